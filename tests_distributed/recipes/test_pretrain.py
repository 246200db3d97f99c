"""The training job on several ranks: the same run on each strategy, in parts and in stages; resumed, refused, stopped."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from nemo_like.distributed.ranks import Ranks
from nemo_like.recipes.options import PretrainOptions
from nemo_like.recipes.pretrain import main
from nemo_like.recipes.pretrain import run_job as run_loop
from tests.models.tiny import Block
from tests_distributed.recipes.pretrain_job import LLAMA, ranks_of, run_job, run_main, wait_for
from tests_distributed.spawn import run_ranks

transformers = pytest.importorskip("transformers")

SAVED = ("--save-every", "2", "--keep", "9")
"""Together with --checkpoint-dir."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """PretrainOptions of a small job: a 2-layer Llama of width 32 with dropout, on some text of its own."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "config.json").write_text(json.dumps(LLAMA | {"attention_dropout": 0.1}))
    (folder / "plain.json").write_text(json.dumps(LLAMA))
    text = "".join(f"{i} bottles of beer on the wall, {i} bottles of beer.\n" for i in range(400, 0, -1))
    (folder / "text.txt").write_text(text)
    line = "--seq-len 16 --global-batch 8 --steps 8 --log-every 3 --eval-samples 6 --eval-every 4 --warmup-steps 2"
    return f"{line} --data {folder / 'text.txt'} --model {folder / 'config.json'} --device cpu".split()


def _plain(base: list[str]) -> list[str]:
    """The same without dropout, whose random numbers belong to a rank."""
    return [word.replace("config.json", "plain.json") for word in base]


def plain_model(dropout: float = 0.0) -> nn.Module:
    """No config, no transformers: logits straight from a stack of blocks."""
    stack = nn.Sequential(*(Block(24, dropout=dropout) for _ in range(3)))
    return nn.Sequential(OrderedDict(embed=nn.Embedding(256, 24), blocks=stack, head=nn.Linear(24, 256)))


def dropout_model() -> nn.Module:
    """The same with dropout."""
    return plain_model(0.1)


def _assert_close(a: dict[str, Any], b: dict[str, Any]) -> None:
    # Only the order of float32 sums over samples and ranks differs, by some 1e-7 per step; Adam's division by the
    # gradient's own size makes more of it where a gradient is nearly 0.
    first = max(a["first_step"], b["first_step"])
    a_losses, b_losses = a["losses"][first - a["first_step"] :], b["losses"][first - b["first_step"] :]
    assert len(a_losses) == len(b_losses) > 0
    torch.testing.assert_close(torch.tensor(a_losses), torch.tensor(b_losses), rtol=1e-4, atol=0)
    assert a["eval_losses"][-1]["loss"] == pytest.approx(b["eval_losses"][-1]["loss"], rel=1e-4)


OTHER_RUNS = (
    (2, "--strategy fsdp2 --grad-accum 4 --sync every --ac full"),
    (2, "--strategy ddp --grad-accum 2 --ac submodule"),
    (2, "--strategy fsdp2 --grad-accum 2"),
    (4, "--strategy fsdp2 --dp-replicate 2 --ac none --offload all"),
    (4, "--strategy fsdp2 --tp 2"),
    (2, "--strategy fsdp2 --ac 40%"),
)


@pytest.mark.parametrize("others", [OTHER_RUNS[:2], pytest.param(OTHER_RUNS[2:], marks=pytest.mark.long)])
def test_every_strategy_and_number_of_ranks_is_the_same_run(
    base: list[str], tmp_path: Path, others: tuple[tuple[int, str], ...]
):
    arguments = _plain(base)
    single = run_job(1, [*arguments, "--ac", "none"], tmp_path / "single")
    assert len(single["losses"]) == 8 and single["losses"][-1] < single["losses"][0] - 0.1
    assert [evaluation["step"] for evaluation in single["eval_losses"]] == [4, 8]
    assert (single["strategy"], single["world_size"], len(single["peak_bytes"])) == ("single", 1, 1)
    again = run_job(1, [*arguments, "--ac", "selective"], tmp_path / "again")
    assert again["losses"] == single["losses"], "checkpointing changes no bit"
    for world_size, line in others:
        found = run_job(world_size, [*arguments, *line.split()], tmp_path / "found")
        _assert_close(found, single)
        assert (found["strategy"], found["world_size"]) == (line.split()[1], world_size)
        assert len(found["peak_bytes"]) == world_size and min(found["peak_bytes"]) > 2**20
        assert found["losses"][0] == pytest.approx(single["losses"][0], rel=1e-6), "the seed gives the same weights"


@pytest.mark.long
def test_two_ranks_train_other_models_as_one_does(base: list[str], tmp_path: Path):
    arguments = _plain(base)
    own = [*arguments, "--model", "tests_distributed.recipes.test_pretrain:plain_model", "--ac", "full"]
    _assert_close(run_job(2, own, tmp_path / "found"), run_job(1, own, tmp_path / "single"))
    arguments += ["--init", "sharded"]
    _assert_close(run_job(2, [*arguments, "--cpu-offload"], tmp_path / "found"), run_job(1, arguments, tmp_path / "single"))


@pytest.mark.long
def test_fifty_steps_of_the_default_job_beat_byte_frequencies(tmp_path: Path):
    """The README's command, a quarter of it: real text, two ranks, every default."""
    run = run_job(2, ["--steps", "50", "--eval-every", "0"], tmp_path / "run.json")
    assert run["losses"][-1] < run["losses"][0] - 2
    assert run["eval_losses"][-1]["loss"] < run["unigram_entropy"] - 0.2


def _keep_up_to(step: int, whole: Path, folder: Path) -> list[str]:
    """A copy of the checkpoints up to `step`, as a run killed before the next one leaves them."""
    shutil.copytree(whole, folder)
    for path in folder.iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return [*SAVED, "--checkpoint-dir", str(folder), "--resume"]


def test_resume_is_bitwise_on_the_same_ranks(base: list[str], tmp_path: Path):
    whole = tmp_path / "whole"
    full = run_job(2, [*base, *SAVED, "--checkpoint-dir", str(whole)], tmp_path / "full")
    resumed = run_job(2, [*base, *_keep_up_to(4, whole, tmp_path / "four")], tmp_path / "resumed")
    assert resumed["first_step"] == 4
    assert resumed["losses"] == full["losses"][4:], "the same bits, dropout included"
    assert resumed["eval_losses"] == full["eval_losses"][1:]
    both = [(tmp_path / name / "step-00000008" / "__1_0.distcp").read_bytes() for name in ("whole", "four")]
    assert both[0] == both[1], "and the same weights and moments"


@pytest.mark.long
def test_resume_is_correct_on_other_ranks(base: list[str], tmp_path: Path):
    whole = tmp_path / "plain"
    plain = run_job(2, [*_plain(base), *SAVED, "--checkpoint-dir", str(whole)], tmp_path / "full")
    _assert_close(run_job(4, [*_plain(base), *_keep_up_to(2, whole, tmp_path / "two")], tmp_path / "resumed"), plain)
    whole = tmp_path / "two"  # step 2 by two ranks, steps 4, 6 and 8 by four
    on_one = run_job(1, [*_plain(base), *_keep_up_to(6, whole, tmp_path / "six")], tmp_path / "resumed")
    assert on_one["first_step"] == 6
    _assert_close(on_one, plain)
    split = run_job(4, [*_plain(base), *_keep_up_to(6, whole, tmp_path / "split"), "--tp", "2"], tmp_path / "resumed")
    _assert_close(split, plain)


@contextlib.contextmanager
def _torchrun(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "nemo_like.recipes.pretrain", *arguments]
    root = Path(__file__).parents[2]  # so that the ranks find this module
    process = subprocess.Popen(command, text=True, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:  # a failed test: the launcher ends its ranks
            process.terminate()
        process.communicate(timeout=60)


@pytest.mark.long
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="finds the ranks' processes in /proc (Linux)")
def test_a_killed_rank_and_ctrl_c_lose_nothing(base: list[str], tmp_path: Path):
    line = "--steps 80 --eval-every 0 --model tests_distributed.recipes.test_pretrain:dropout_model"
    expected = run_job(2, [*base, *line.split()], tmp_path / "expected")["losses"]
    run = tmp_path / "run"
    arguments = [
        *base,
        *line.split(),
        *["--save-every", "5", "--keep", "2"],
        "--checkpoint-dir",
        str(run),
        "--json",
        str(tmp_path / "summary"),
    ]

    with _torchrun(arguments) as killed:
        wait_for(lambda: _newest(run) >= 5, killed)
        os.kill(ranks_of(killed)[1], signal.SIGKILL)
        output, _ = killed.communicate(timeout=60)
    assert killed.returncode != 0, output
    reached = _newest(run)
    assert 5 <= reached < 80
    assert not (tmp_path / "summary").exists()

    with _torchrun([*arguments, "--resume"]) as stopped:
        wait_for(lambda: _newest(run) >= reached + 10, stopped)
        stopped.send_signal(signal.SIGINT)
        output, _ = stopped.communicate(timeout=60)
    assert stopped.returncode != 0 and "Stopped by SIGINT after step" in output, output
    summary = json.loads((tmp_path / "summary").read_text())
    last = summary["first_step"] + len(summary["losses"])
    assert summary["interrupted"] and summary["first_step"] == reached and _newest(run) == last < 80
    assert summary["losses"] == expected[reached:last]

    with _torchrun([*arguments, "--resume"]) as finished:
        output, _ = finished.communicate(timeout=120)
    assert finished.returncode == 0, output
    summary = json.loads((tmp_path / "summary").read_text())
    assert summary["first_step"] == last and summary["losses"] == expected[last:]


def _errors(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[str]:
    ranks = Ranks(rank, world_size, torch.device("cpu"), control=dist.new_group(backend="gloo"))
    found = []
    for case in cases:
        case = {name: value[rank] if isinstance(value, list) else value for name, value in case.items()}
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                run_loop(PretrainOptions(**case), ranks)
                found.append("no error")
            except (ValueError, RuntimeError) as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_bad_input_is_an_error_on_every_rank_and_hangs_none(base: list[str], tmp_path: Path):
    good: dict[str, Any] = {base[i][2:].replace("-", "_"): base[i + 1] for i in range(0, len(base), 2)}
    good = {name: int(value) if value.isdecimal() else value for name, value in good.items()} | {"steps": 2}
    (tmp_path / "tiny.txt").write_text("too short")
    (tmp_path / "other.txt").write_text(Path(good["data"]).read_text().upper())
    (tmp_path / "vocabulary.json").write_text(json.dumps(LLAMA | {"vocab_size": 100}))
    (tmp_path / "wide.json").write_text(json.dumps(LLAMA | {"intermediate_size": 96}))
    other = str(tmp_path / "other.txt")
    run, broken = str(tmp_path / "run"), tmp_path / "broken"
    nowhere, text = str(tmp_path / "nowhere"), str(good["data"])
    run_job(2, [*base, "--steps", "2", *SAVED, "--checkpoint-dir", run], tmp_path / "summary")
    shutil.copytree(run, broken)
    (broken / "step-00000002" / "__1_0.distcp").write_bytes(b"")
    cases: dict[str, dict[str, Any]] = {
        "nothing exists there": {"data": nowhere},
        "too few for one batch": {"data": str(tmp_path / "tiny.txt")},
        "The ranks see different training texts": {"data": [text, other]},
        "Model 'llama-tyny' is not a preset": {"model": "llama-tyny"},
        "has 100 tokens; bytes need a vocab_size >= 256": {"model": str(tmp_path / "vocabulary.json")},
        "--global-batch is 7": {"global_batch": 7},
        "--strategy is 'single', and 2 ranks": {"strategy": "single"},
        "dp_replicate": {"dp_replicate": 3},
        "scope 'vison' is unknown": {"scope": "vison"},
        "has checkpoints up to step 2 already": {"checkpoint_dir": run},
        "--resume finds no checkpoint": {"checkpoint_dir": nowhere, "resume": "must"},
        "--seed was 0 when the checkpoint was written, and is 1": {"checkpoint_dir": run, "resume": "must", "seed": 1},
        "holds other data than the checkpoint's run read": {"checkpoint_dir": run, "resume": "must", "data": other},
        "have other names or shapes": {"checkpoint_dir": run, "resume": "must", "model": str(tmp_path / "wide.json")},
        "step-00000002 cannot be read": {"checkpoint_dir": str(broken), "resume": "must"},
    }
    found = run_ranks(2, _errors, [good | case for case in (*cases.values(), {"data": [text, nowhere]})])
    for on_rank in found:
        for message, error in zip(cases, on_rank, strict=False):
            assert message in error
    assert found[0][-1].startswith("OtherRankError: Another rank failed while reading the training text")
    assert found[1][-1].startswith("ValueError: --data is ")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_gpu_trains_as_the_cpu_does_and_resumes(base: list[str], tmp_path: Path):
    cpu = run_job(1, _plain(base), tmp_path / "cpu")
    arguments = [*_plain(base), "--device", "cuda", *SAVED, "--checkpoint-dir", str(tmp_path / "run")]
    cuda = run_job(1, arguments, tmp_path / "cuda")
    # Other kernels sum in another order, and Adam makes more of it where a gradient is nearly 0.
    torch.testing.assert_close(torch.tensor(cuda["losses"]), torch.tensor(cpu["losses"]), rtol=1e-3, atol=0)
    assert cuda["peak_bytes_are"].startswith("bytes of tensors in the CUDA") and 0 < cuda["peak_bytes"][0] < 2**30
    shutil.rmtree(tmp_path / "run" / "step-00000008")
    resumed = run_job(1, [*arguments, "--resume"], tmp_path / "resumed")
    torch.testing.assert_close(torch.tensor(resumed["losses"]), torch.tensor(cuda["losses"][6:]), rtol=1e-5, atol=0)


def test_loss_that_is_no_number_ends_the_run_before_it_is_saved(base: list[str], tmp_path: Path):
    line = f"--lr 1e30 --clip 0 --warmup-steps 0 --checkpoint-dir {tmp_path / 'run'}"
    assert run_ranks(2, run_main, [*base, *SAVED, *line.split()], init_group=False) == [2, 2]
    assert list((tmp_path / "run").iterdir()) == []


def _newest(folder: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=-1)


def _main_interrupted(rank: int, world_size: int, arguments: list[str], folder: str, number: int) -> int:
    def interrupt() -> None:
        while _newest(Path(folder)) < 2:
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    return main(arguments)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_plain_process_saves_and_ends(base: list[str], tmp_path: Path, number: int):
    arguments = [*base, "--steps", "9999", *SAVED, "--checkpoint-dir", str(tmp_path)]
    assert run_ranks(1, _main_interrupted, arguments, str(tmp_path), int(number), init_group=False) == [128 + number]
    assert 2 <= _newest(tmp_path) < 9999


# ------------------------------------------------------------------------------------------------ experts on many ranks


@pytest.fixture(scope="module")
def experts(base: list[str]) -> list[str]:
    """The same with the preset that has experts."""
    line = "--grad-accum 2 --steps 6 --eval-samples 8 --eval-every 0 --model mixtral-tiny"
    return [*base, *line.split()]


def _assert_same(found: list[float], wanted: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=0)


@pytest.mark.long
def test_experts_on_two_ranks_are_the_same_run_and_resume_on_others(experts: list[str], tmp_path: Path) -> None:
    drawn = [*experts, "--init", "sharded"]
    whole = run_job(2, drawn, tmp_path / "whole")["losses"]
    assert len(whole) == 6 and whole[-1] < whole[0]
    _assert_same(run_job(2, [*drawn, "--ep", "2"], tmp_path / "split")["losses"], whole)
    constant = [*experts, "--schedule", "constant"]
    whole = run_job(2, constant, tmp_path / "constant")["losses"]
    run = tmp_path / "run"
    split = run_job(
        2, [*constant, "--ep", "2", "--steps", "4", *SAVED, "--checkpoint-dir", str(run)], tmp_path / "first"
    )
    assert split["options"]["ep"] == 2
    _assert_same(split["losses"], whole[:4])
    for ranks, ep in ((2, 1), (4, 4)):
        copied = shutil.copytree(run, tmp_path / f"run{ranks}")
        more = ["--ep", str(ep), "--grad-accum", "1", *SAVED, "--checkpoint-dir", str(copied), "--resume"]
        resumed = run_job(ranks, [*constant, *more], tmp_path / f"second{ranks}")
        assert resumed["first_step"] == 4
        _assert_same(resumed["losses"], whole[4:])


# ------------------------------------------------------------------------------------------------- stages of a pipeline


@pytest.fixture(scope="module")
def staged(base: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same with a model of four layers."""
    config = tmp_path_factory.mktemp("staged") / "config.json"
    config.write_text(json.dumps(LLAMA | {"num_hidden_layers": 4}))
    return [*base, *f"--schedule constant --warmup-steps 1 --eval-every 0 --model {config}".split()]


@pytest.mark.long
def test_stages_train_as_one_process_and_resume_on_another_number_of_them(staged: list[str], tmp_path: Path) -> None:
    whole = run_job(1, [*staged, "--steps", "9"], tmp_path / "whole")
    kept = [*staged, "--checkpoint-dir", str(tmp_path / "kept"), "--keep", "9", "--save-every", "3"]
    lines = (
        (2, "--steps 3 --pp 2 --pp-schedule zbv --ac 30MiB"),
        (1, "--steps 6 --resume"),
        (4, f"--steps 9 --resume --pp 2 --cp 2 --ac full --loss chunked --export {tmp_path / 'folder'}"),
    )
    runs = [run_job(ranks, [*kept, *line.split()], tmp_path / "run.json") for ranks, line in lines]
    assert [run["first_step"] for run in runs] == [0, 3, 6]
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert dict(exported.named_parameters()).keys() == load_file(tmp_path / "folder" / "model.safetensors").keys()
    found = torch.tensor([loss for run in runs for loss in run["losses"]])
    torch.testing.assert_close(found, torch.tensor(whole["losses"]), rtol=1e-5, atol=0)
    assert runs[-1]["eval_losses"][-1]["loss"] == pytest.approx(whole["eval_losses"][-1]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--pp 3", "--pp=3 does not divide the 2 rank"),
        ("--pp 2 --grad-accum 1 --global-batch 8 --init sharded", "--init is 'sharded' with --pp 2"),
        ("--pp 2 --pp-schedule dualpipev --grad-accum 2", "--pp, --pp-schedule and --grad-accum: microbatches is 2"),
        ("--pp 2 --strategy ddp", "--strategy is 'ddp' with --pp 2"),
    ],
)
def test_what_a_pipeline_cannot_have(staged: list[str], line: str, message: str, tmp_path: Path) -> None:
    assert run_ranks(2, _refused, [*staged, "--steps", "1", *line.split()], str(tmp_path), init_group=False) == [2, 2]
    assert message in (tmp_path / "said-0").read_text()


def _refused(rank: int, world_size: int, arguments: list[str], folder: str) -> int:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    (Path(folder) / f"said-{rank}").write_text(said.getvalue())
    return code
