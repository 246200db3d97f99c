"""Kept traces: a warm answer is the cold one, and a file that is not whole is not there.

The judge is the answer without a store, of the same question.
"""

import errno
import importlib
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from nemo_like import ExpertParallel, Job, PipelineParallel, TensorParallel, predict
from nemo_like._util.log import say_once
from nemo_like.distributed.documents import in_blocks, masks_in_blocks
from nemo_like.models import resolve_model
from nemo_like.options import FSDP2, StepSpec
from nemo_like.planning.model import traced
from nemo_like.planning.predictions import reserved
from nemo_like.planning.query import PlanQuery, Traced
from nemo_like.planning.trace import store
from nemo_like.planning.trace.store import Store, contents_of_integers, digest, keeping
from tests.models.tiny import labelled
from tests.planning.queries import Text, part_of

OTHERS: dict[str, tuple[Any, ...]] = {
    "loss": (None, "chunked"),
    "compile": (None, None, "aot_eager"),
    "offload": ("none", "boundary"),
    "optimizer": ("adamw", "adamw-8bit", "sgd"),
    "step": (StepSpec(), StepSpec(microbatches=2), StepSpec(keeps_output=False)),
    "strategy": ("ddp", FSDP2(), FSDP2(reshard_after_forward=False)),
    "gpu": ("h100-80gb", "a100-80gb", "cpu"),
    "precision": ("bf16", None),
    "seq_len": (128, 256),
    "tp": (1, TensorParallel(2, sequence_parallel=True)),
    "cp": (1, 1, 2),
    "pp": (1, 1, PipelineParallel(2, microbatches=2)),
}


@contextmanager
def kept_in(folder: Path, about: object = "tiny") -> Iterator[Store]:
    """Keep traces in `folder`, also of a model that is no command's."""
    kept = Store(folder, about)
    token = store._current.set(kept)
    try:
        yield kept
    finally:
        store._current.reset(token)
        kept.save()


def put(folder: Path, value: Any, about: str = "tiny", key: str = "key") -> Any:
    """Return what a store of its own has under `key`, or `value`, which it keeps from now on."""
    one = Store(folder, about)
    there = one.get("shape", key, lambda: value)
    one.save()
    return there


def answer(model: str = "llama-tiny", **job: Any) -> tuple[str, dict[str, Any]] | str:
    try:
        report = predict(model, **({"gpus": 8, "seq_len": 128, "rows": ["50%"]} | job))
        return report.text(200, explain=True), report.to_dict()
    except (ValueError, NotImplementedError) as error:
        return str(error)


@contextmanager
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where a model, a layer or what is around the layers runs on fake tensors."""

    runs = Mock(side_effect=AssertionError("it runs on fake tensors"))
    with monkeypatch.context() as patched:
        for name in ("trace_model", "block_memory", "outer_memory", "traced_block", "trace_kind"):
            patched.setattr(traced, name, runs)
        yield


@pytest.mark.parametrize(
    "job",
    [
        {},
        # Each runs a model's layers a dozen times, of which the first does, too.
        pytest.param({"compile": "aot_eager", "step": StepSpec(microbatches=2)}, marks=pytest.mark.long),
        pytest.param(
            {"rows": ['[{"save": ["up", "attention"]}]', '[{"recompute": ["mlp"]}]'], "loss": "chunked"},
            marks=pytest.mark.long,
        ),
        pytest.param({"model": "mixtral-tiny", "ep": ExpertParallel(2), "seq_len": 32}, marks=pytest.mark.long),
    ],
)
def test_a_warm_answer_is_the_cold_one_and_runs_nothing(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = answer(**job)
    assert isinstance(without, tuple), without
    with kept_in(tmp_path):
        assert answer(**job) == without
    with kept_in(tmp_path), nothing_runs(monkeypatch):
        assert answer(**job) == without
        # Other GPUs of the same kind run the same kernels: their rates are not in the store.
        other = answer(**job | {"gpu": "h200"})
    assert other == answer(**job | {"gpu": "h200"}) != without


def pair(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two jobs, of which the second differs in one or two fields."""
    draws = random.Random(seed)
    first = {name: draws.choice(values) for name, values in OTHERS.items() if draws.random() < 0.4}
    return first, first | {name: draws.choice(OTHERS[name]) for name in draws.sample(sorted(OTHERS), 2)}


@pytest.mark.long  # four answers for each of 40 pairs
def test_pairs_of_jobs_share_a_store(tmp_path: Path) -> None:
    """One after the other in one store, then both warm."""
    planned = 0
    for seed, folder in zip(range(40), itertools.cycle("abcd")):
        jobs = pair(seed)
        without = [answer(**job) for job in jobs]
        for job, cold in 2 * list(zip(jobs, without)):
            with kept_in(tmp_path / folder):
                assert answer(**job) == cold, (seed, job)
        planned += all(isinstance(each, tuple) for each in without)
    assert planned > 10


def test_reserved_bytes_are_kept_for_other_limits_losses_and_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = Mock(wraps=reserved.replay)
    monkeypatch.setattr(reserved, "replay", replay)
    one = Job.of(world_size=4, gpu="h100-80gb", pp=PipelineParallel(2, microbatches=4))
    with kept_in(tmp_path):
        query_of = Traced(Text(4), labelled(torch.zeros(2, 16, dtype=torch.long))).query
        others = ({"loss": "chunked"}, {"gpu": "h200"}, {"attention": "flash"})
        queries = [query_of(job) for job in (one, *(one.change(**other) for other in others))]
        sizes = [reserved.reserved_within(q, q.uniform("full"), 2**40 + at, [0]) for at, q in enumerate(queries)]
    assert len(sizes) == 4 and all(size == sizes[0] for size in sizes) and replay.call_count == 1


QUESTIONS = (
    "--no-what-if --ac 50%",
    "",
    "--gpus 4 --gpu a100-80gb",
    "--loss chunked --explain",
    "--compile inductor",
    "--ac 50% --ac 60%",
    '--ac [{"save":["up"]}]',
    "--optimizer adamw-8bit --no-what-if",
    "--tp 2",
    "--cp 2",
    "--pp 2 --grad-accum 4",
    "--grad-accum 4 --sync last",
    "--offload boundary",
    "--optimizer sgd --gpus 2",
    "--gpus 1",
    "--lora 4",
    "--precision fp32",
    "--dtype bf16",
    "--gpus min",
    "--seq-len max --gpu cpu",
    "--batch-size max --no-what-if --memory 1GiB",
    "--batch-size 3",
    "--memory 20MiB",
    "--reshard-after-forward no",
    "--cpu-offload",
    "--dp-replicate 2",
    "--gpu cpu",
    "--gpu b200 --wide",
    "--model mixtral-tiny --ep 2",
    "--model llama-small --explain",
    "--model llama-tiny --tp 2 --sequence-parallel --loss-parallel",
)


def asked(program: Any, words: str, folder: Path) -> tuple[str, Any]:
    """Return what `plan` prints for a question, and its JSON, without the seconds that it took."""
    words = f"plan --model llama-tiny --gpus 8 --gpu h100-80gb --seq-len 128 {words} --json {folder}/out.json"
    try:
        out = program(words).out
    except AssertionError:  # nothing fits
        out = program(words, ends=1).out
    lines = [line for line in out.splitlines() if not line.startswith("Planned in")]
    return "\n".join(lines), json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize(
    "words", [pytest.param(words, marks=() if not at else pytest.mark.long) for at, words in enumerate(QUESTIONS)]
)
def test_a_command_answers_the_same_without_cold_and_warm(
    words: str, program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_LIKE_CACHE", str(tmp_path))
    without = asked(program, f"{words} --no-cache", tmp_path)
    assert not (tmp_path / "traces").exists()
    assert asked(program, words, tmp_path) == without, "cold"
    assert list((tmp_path / "traces").glob("*.json"))
    with nothing_runs(monkeypatch):
        assert asked(program, words, tmp_path) == without, "warm"


def test_off_keeps_nothing_and_a_function_of_the_caller_is_not_kept(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve_model("llama-tiny").config
    for wanted, of, folder in ((True, config, "off"), (False, config, str(tmp_path)), (True, None, str(tmp_path))):
        monkeypatch.setenv("NEMO_LIKE_CACHE", folder)
        with keeping(wanted, of):
            assert store.current_store() is None
    with keeping(True, config):
        assert isinstance(store.current_store(), Store)
    assert store.current_store() is None and not list(tmp_path.iterdir()), "nothing was traced"


def test_only_what_words_tell_is_kept(tmp_path: Path) -> None:
    kept = Store(tmp_path, "tiny")
    others = {"warned": lambda: [say_once("it falls back")], object(): lambda: 1, "object": lambda: {"at": object()}}
    assert all(kept.get("shape", key, make) for key, make in others.items())
    assert kept.get("shape", "plain", lambda: ((1, 2), "a", frozenset({(0, 1)}), {1: [2.5, None, True]}))
    kept.save()
    assert [*json.loads(next(tmp_path.glob("*.json")).read_text().partition("\n")[2])] == [digest("plain")]
    assert put(tmp_path, None, key="plain") == ((1, 2), "a", frozenset({(0, 1)}), {1: [2.5, None, True]})


@pytest.mark.parametrize("change", ["cut", "emptied", "garbage", "one digit", "a folder"])
def test_a_damaged_file_is_not_there(change: str, tmp_path: Path) -> None:
    put(tmp_path, 12345)
    (path,) = tmp_path.glob("*.json")
    text = path.read_text()
    changed = {"cut": text[:-9], "emptied": "", "garbage": "\0{[", "one digit": text.replace("12345", "12346")}
    path.unlink()
    if change == "a folder":
        path.mkdir()
    else:
        path.write_text(changed[change])
    assert put(tmp_path, 7) == 7
    assert put(tmp_path, 8) == (8 if change == "a folder" else 7), "it was written again"


def test_another_version_sample_or_model_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [put(tmp_path, 0), put(tmp_path, 1), put(tmp_path, 2, "small")] == [0, 0, 2]
    monkeypatch.setenv("TORCH_ANYTHING", "1")
    assert put(tmp_path, 3) == 3
    monkeypatch.delenv("TORCH_ANYTHING")
    assert put(tmp_path, 4) == 0
    installed = tmp_path / "site"
    (installed / "torch_fork-1.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(installed)
    assert put(tmp_path, 5) == 5
    ids = torch.zeros(2, 4, dtype=torch.long)
    same, other = {"a": ids.clone(), "x": torch.rand(2)}, {"a": ids + 1}
    assert contents_of_integers(same) == contents_of_integers({"a": ids}) != contents_of_integers(other)


def test_code_of_the_model_that_was_changed_in_place_is_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a checkout that is installed as a link: the version stays."""
    (tmp_path / "linked" / "models").mkdir(parents=True)
    (tmp_path / "linked" / "__init__.py").write_text("class Config:\n    def to_dict(self):\n        return {}\n")
    code = tmp_path / "linked" / "models" / "modeling.py"
    code.write_text("scale = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NEMO_LIKE_CACHE", str(tmp_path))

    def about() -> str:
        with keeping(True, importlib.import_module("linked").Config()):
            return getattr(store.current_store(), "about", "nothing is kept")

    first, again = about(), about()
    code.write_text("scale = 10\n")
    assert first == again != about()


def test_a_run_that_comes_later_has_the_masks_of_its_part() -> None:
    with masks_in_blocks(True):
        query = PlanQuery.from_model(Text(), labelled(torch.zeros(2, 16, dtype=torch.long)), Job.of(gpu="cpu"))
    assert part_of(query).stored("masks", in_blocks.get) and not in_blocks.get()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES])
def test_where_it_cannot_be_kept_one_sentence_tells(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: Any
) -> None:
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=OSError(error, os.strerror(error))))
    kept = Store(tmp_path / "traces", "tiny")
    assert kept.get("shape", "key", lambda: 1) == kept.get("shape", "key", lambda: 2) == 1
    kept.save()
    kept.save()
    assert logs.text.count("Traces are not kept") == 1 and os.strerror(error) in logs.text
    assert not list((tmp_path / "traces").iterdir())
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    Store(tmp_path / "file" / "traces", "tiny").save()  # nothing is new, so nothing is written


def test_a_folder_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 1)
    monkeypatch.setattr(os, "utime", Mock(side_effect=PermissionError(errno.EACCES, os.strerror(errno.EACCES))))
    assert put(tmp_path, 2) == 1


def test_two_writers_keep_what_both_found(tmp_path: Path) -> None:
    first, second = Store(tmp_path, "tiny"), Store(tmp_path, "tiny")
    first.get("shape", "a", lambda: 1)
    second.get("shape", "b", lambda: 2)
    first.save()
    second.save()
    assert (put(tmp_path, 0, key="a"), put(tmp_path, 0, key="b")) == (1, 2)


def test_the_oldest_uses_go_and_files_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thesis.json").write_text("x" * 2000)
    (tmp_path / f"{'0' * 32}.json.99999.partial").write_text("x" * 600)  # of a writer that was killed
    os.utime(tmp_path / f"{'0' * 32}.json.99999.partial", (1, 1))
    monkeypatch.setattr(store, "MOST_BYTES", 900)
    for at, name in enumerate("abc"):
        kept = Store(tmp_path, name)
        kept.get("shape", "key", lambda: "y" * 300)
        if name == "c":
            time.sleep(0.01)
            assert Store(tmp_path, "a").get("shape", "key", lambda: "") == "y" * 300, "used again"
        kept.save()
        newest = max(tmp_path.glob("*.json"), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (at + 100, at + 100)) if name != "c" else None
    assert [Store(tmp_path, name).get("shape", "key", lambda: "") for name in "abc"] == ["y" * 300, "", "y" * 300]
    assert {path.name for path in tmp_path.iterdir()} >= {"thesis.json"} and not list(tmp_path.glob("*.partial"))
