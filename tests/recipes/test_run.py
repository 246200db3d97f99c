"""A run of the training job: its options, what it shows, and its signals."""

from __future__ import annotations

import dataclasses
import io
import mmap
import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like._util.interrupt import Interrupt
from nemo_like._util.live_bytes import memory_peak, memory_used
from nemo_like._util.log import forget_announcements
from nemo_like._util.option_fields import parse_options
from nemo_like.distributed.launch import let_segments_grow
from nemo_like.distributed.ranks import Ranks
from nemo_like.recipes.data import Batch
from nemo_like.recipes.log import Progress
from nemo_like.recipes.loop import Pretraining, make_optimizer, with_sync
from nemo_like.recipes.options import PretrainOptions

WRONG = {
    "--strategy fsdp1": r"--strategy is 'fsdp1'; it must be one of fsdp2, ddp, single\. Did you mean 'fsdp2'\?",
    "--ac selectiv": r"--ac: ac is 'selectiv'.*Did you mean 'selective'",
    "--loss chunkd": r"--loss is 'chunkd'; it must be one of model, chunked\. Did you mean 'chunked'\?",
    "--compile inducter": r"--compile is 'inducter'.*Did you mean 'inductor'",
    "--precision int8": r"--precision is 'int8'; it must be a torch dtype",
    "--precision fp16": r"--precision is 'fp16': its small range needs the loss to be scaled.*Use bfloat16",
    "--device tpu": r"--device is 'tpu'; it must be one of auto, cpu, cuda",
    "--schedule step": r"--schedule is 'step'; it must be one of cosine",
    "--resume=maybe": r"--resume is 'maybe'; it must be one of no, must, auto",
    "--resume": r"--resume needs --checkpoint-dir",
    "--steps 0": r"--steps is 0; it must be a finite number >= 1",
    "--lr nan": r"--lr is nan; it must be a finite number",
    "--lr -1": r"--lr is -1.0",
    "--beta2 1": r"--beta2 is 1.0; it must be less than 1",
    "--grad-accum 3": r"--grad-accum is 3, which does not divide --global-batch 8",
    "--json /nowhere/at/all.json": r"--json names a file in '/nowhere/at', which is not an existing folder",
    "--steps many": r"--steps: invalid int value: 'many'",
    "--step-size 3": r"unrecognized arguments: --step-size 3",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_option_ends_with_code_2_and_says_why(line: str, ending: Any):
    written = ending(parse_options, PretrainOptions, line.split())
    assert written.out == ""
    assert re.search(WRONG[line], written.err)


def test_command_line_and_dataclass_are_the_same_options(tmp_path: Path):
    assert parse_options(PretrainOptions, []) == PretrainOptions()
    given = PretrainOptions(
        strategy="ddp", ac="40GiB", steps=7, lr=0.5, sync_save=True, checkpoint_dir=str(tmp_path), resume="must"
    )
    line = f"--strategy DDP --ac 40GiB --steps 7 --lr .5 --sync-save --checkpoint-dir {tmp_path} --resume"
    assert parse_options(PretrainOptions, line.split()) == given


def test_every_option_is_explained(ending: Any):
    text = ending(parse_options, PretrainOptions, ["--help"], code=0).out
    for field in dataclasses.fields(PretrainOptions):
        assert re.search(rf"--{field.name.replace('_', '-')}[ ,\n]", text)
        assert len(field.metadata["help"]) > 10


def test_scope_may_be_several():
    assert PretrainOptions(scope="vision,audio").job().ac_scope == ("vision", "audio")
    assert PretrainOptions(scope="all").job().ac_scope == "all"


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("given", "memory", "reduces"),
    [
        ({}, 4 * 4 * 24, "last"),
        ({}, 4 * 4 * 24 - 1, "every"),
        ({"precision": "bf16"}, 4 * 4 * 24, "last"),  # reduced in float32 all the same
        ({"sync": "last"}, 1, "last"),
        ({"strategy": "ddp"}, 1, "auto"),  # whole gradients are there in any case
        ({"grad_accum": 1}, 1, "auto"),
    ],
)
def test_whole_gradients_are_kept_where_they_are_a_quarter_of_the_device(
    given: dict[str, Any], memory: int, reduces: str
) -> None:
    options = PretrainOptions(**({"strategy": "fsdp2", "grad_accum": 2} | given))
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 2).requires_grad_(False))
    chosen = with_sync(options, model, memory)
    assert chosen.sync == reduces
    if reduces != "auto":
        assert chosen.job().step.sync == reduces


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_it_prints_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.delenv("COLUMNS", raising=False)
    progress = Progress(200, CPU)
    progress.say("hello")
    progress.step(10, 2.5, 3e-4, 1234.4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hello"
    assert lines[1].startswith("step  10/200  loss 2.5000  lr 3.00e-04  1,234 tokens/s  memory ")
    assert "peak" in lines[1] and len(lines) == 2


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_what_matters_most_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal := _Terminal())
    Progress(2000, CPU).step(10, 12.5, 3e-4, 123456.4, 0.4)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n")
    line = next(line.rstrip() for line in text.splitlines() if "loss" in line)
    assert len(line) <= columns and "…" not in line
    assert re.match(r"(step )? +10/2000 .*loss 12.5000 .*123,456 tokens/s .*peak \d+\.\d\d GiB", line), line
    assert ("MFU 40.0%" in line) is (columns == 120), line


def test_only_rank_zero_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("RANK", "1")
    progress = Progress(200, CPU)
    progress.say("hello")
    progress.step(10, 2.5, 3e-4, 1234.4)
    assert capsys.readouterr().out == ""


def test_memory_counts_resident_bytes_of_this_process():
    before, peak = memory_used(CPU), memory_peak(CPU)
    assert 2**24 < before <= peak + 2**20  # an interpreter with torch; the two counters are read a moment apart
    size = 2**28
    held = mmap.mmap(-1, size)  # new pages: malloc would give freed ones of earlier tests, which are counted already
    torch.frombuffer(held, dtype=torch.uint8).fill_(1)
    # Pages of other objects come and go meanwhile, by far less than this tolerance of a sixteenth.
    assert abs(memory_used(CPU) - before - size) < size // 16
    assert memory_peak(CPU) >= before + size - size // 16
    held.close()
    assert memory_used(CPU) < before + size // 16 <= memory_peak(CPU)


def test_a_line_has_what_the_caching_allocator_reserved(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    for name, size in (("memory_allocated", 1), ("max_memory_allocated", 2), ("max_memory_reserved", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size << 30)
    Progress(10, torch.device("cuda")).step(1, 2.0, 1e-3, 1000.0)
    assert "memory 1.00 GiB  peak 2.00 GiB  reserved 3.00 GiB" in capsys.readouterr().out
    Progress(10, torch.device("cpu")).step(1, 2.0, 1e-3, 1000.0)
    assert "reserved" not in capsys.readouterr().out


def test_a_signal_is_noted_in_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_none_is_caught_and_it_is_said(logs: pytest.LogCaptureFixture) -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with Interrupt() as stop:
            seen.extend([stop.requested, signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0, before]
    assert "outside of the main thread" in logs.text


def test_a_file_has_the_options_and_the_command_line_wins(tmp_path: Path, ending: Any) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: 'm: #1'\nseq-len: 64\ncpu_offload: false\nsync_save: false\ndata: null\nlr: 1e-4\nsteps: 9\n"
    )
    expected = PretrainOptions(model="m: #1", seq_len=64, lr=1e-4, steps=9)
    assert parse_options(PretrainOptions, ["--config", str(path)]) == expected
    for line in (["--config", str(path), "--lr", "0.5"], ["--lr", "0.5", "--config", str(path)]):
        assert parse_options(PretrainOptions, line) == dataclasses.replace(expected, lr=0.5)
    path.write_text("sync_save: true\ncheckpoint_dir: run\n")
    assert parse_options(PretrainOptions, ["--config", str(path)]).sync_save
    wrong = {
        "global-batchs: 4": "has 'global-batchs', which is not an option. Did you mean 'global_batch'?",
        "steps: many": "argument --steps: invalid int value: 'many'",
        "steps: 1.5": "argument --steps: invalid int value: '1.5'",
        "sync_save: 3": "argument --sync-save: ignored explicit argument '3'",
        "- steps": "must have one 'option: value' a line; it is a list",
        "steps: [": "while parsing",
    }
    for text, reason in wrong.items():
        path.write_text(text)
        assert reason in ending(parse_options, PretrainOptions, ["--config", str(path)]).err


def test_a_run_on_cuda_has_a_fused_optimizer_and_growing_segments_and_so_has_its_plan(
    monkeypatch: pytest.MonkeyPatch, logs: pytest.LogCaptureFixture
) -> None:
    options = PretrainOptions()
    assert options.on("cpu") is options and PretrainOptions(optimizer="adamw-loop").on("cuda").optimizer == "adamw-loop"
    fused = options.on("cuda")
    assert make_optimizer(torch.nn.Linear(2, 2), fused).defaults["fused"] is True
    for environment in ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}):
        monkeypatch.setattr(os, "environ", dict(environment))
        let_segments_grow("cpu")
        assert os.environ == environment
        logs.clear()
        forget_announcements()
        logs.set_level("INFO", "nemo_like")
        let_segments_grow("cuda")
        assert ("this job sets expandable_segments:True" in logs.text) is (not environment)
        planned = fused.job()
        assert (planned.step.optimizer, planned.allocator.expandable_segments) == ("adamw-fused", not environment)


class _Sent:
    device = torch.device("cpu")

    def pin_memory(self) -> _Sent:
        self.pinned = True
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> tuple[str, bool, bool]:
        return str(device), self.pinned, non_blocking


def test_batches_are_made_one_ahead_and_sent_without_waiting() -> None:
    asked: list[tuple[int, ...]] = []

    def rows(step: int, part: int, parts: int) -> Batch:
        asked.append((step, part, parts))
        if step == 1 and part == 1:
            raise RuntimeError("a file changed")
        return Batch(torch.tensor(part), torch.tensor(step))

    job: Any = object.__new__(Pretraining)
    job.options, job.ranks = PretrainOptions(grad_accum=2, steps=2), Ranks(0, 1, torch.device("cpu"))
    job.rows, job.step, job._ahead = SimpleNamespace(batch=rows), 0, None
    assert [int(batch.inputs) for batch in job._batches()] == [0, 1]
    assert asked == [(0, 0, 2), (0, 1, 2), (1, 0, 2)]
    job.step = 1
    batches = job._batches()
    assert int(next(batches).targets) == 1
    with pytest.raises(RuntimeError, match="a file changed"):
        next(batches)
    sent: Any = Batch(_Sent(), _Sent())  # type: ignore[arg-type]
    assert sent.to(torch.device("cuda")).targets == ("cuda", True, True)
