"""The first whole step of a model under a budget is measured, and compared with the plan."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from nemo_like import StepSpec, parallelize
from nemo_like._util.log import forget_announcements
from nemo_like.profiling import first_step
from nemo_like.profiling.first_step import Seen, SizeWatch, causes

transformers = pytest.importorskip("transformers")
pytest.importorskip("scipy")

IDS = torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.fixture(autouse=True)
def _asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(first_step.VARIABLE, "1")  # on the CPU it is done when asked for


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    forget_announcements()
    with caplog.at_level(logging.INFO, "nemo_like"):
        yield lambda: [r.getMessage() for r in caplog.records if "first whole step" in r.getMessage()]


def _model(step: StepSpec | None = None, sample: Any = BATCH, ac: Any = "60%") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    return parallelize(model, "single", ac, sample_input=sample, step=step, device="cpu")


def _train(
    model: nn.Module, *, steps: int = 3, microbatches: int = 1, drop: bool = False, free: bool = True,
    outside: bool = False, optimizer: torch.optim.Optimizer | None = None, batch: dict[str, Any] = BATCH,
) -> None:  # fmt: skip
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        for _ in range(microbatches):
            out = model(**batch) if not outside else model(batch["input_ids"])
            loss = out.loss
            if outside:
                logits = out.logits[:, :-1].flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())
            if drop:
                del out
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=free)


def _hooks(model: nn.Module) -> tuple[int, int, int]:
    watches = [watch for watch in first_step._watches if watch.model() is model]
    return (
        sum(not isinstance(getattr(hook, "__self__", None), SizeWatch) for hook in model._forward_pre_hooks.values()),
        len(model._forward_hooks),
        len(watches),
    )


def test_the_plainest_loop_is_what_was_planned(said: Callable[[], list[str]]) -> None:
    bare = _hooks(_model(ac="full"))
    model = _model()
    assert _hooks(model) == (bare[0] + 1, bare[1] + 1, 1)
    _train(model)
    assert said() == []
    assert _hooks(model) == (*bare[:2], 0), "nothing is left of it"


@pytest.mark.long
def test_several_models_are_watched_one_after_the_other_and_one_that_is_gone_leaves_nothing() -> None:
    gone, first, second = _model(), _model(), _model()
    del gone
    gc.collect()
    nothing = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    nothing.step()
    assert all(watch.model() is not None for watch in first_step._watches)
    both = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-3)
    left = []
    for _ in range(3):
        (first(**BATCH).loss + second(**BATCH).loss).backward()
        both.step()
        both.zero_grad()
        left.append((_hooks(first)[2], _hooks(second)[2]))
    assert left == [(1, 1), (0, 1), (0, 0)]
    assert len(torch_optimizer._global_optimizer_post_hooks) == 1, "one for all"


@pytest.mark.parametrize("word", ["", "0"])
def test_without_being_asked_nothing_is_watched_on_the_cpu(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(first_step.VARIABLE, word)
    assert _hooks(_model()) == _hooks(_model(ac="full"))


@pytest.mark.long
def test_a_profiler_of_ones_own_is_left_alone(said: Callable[[], list[str]], caplog: pytest.LogCaptureFixture) -> None:
    model = _model()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        _train(model)
    assert any(event.key == "aten::mm" for event in profiler.key_averages())
    assert "A profiler of torch is on already" in caplog.text and said() == []


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("loop", "step", "cause"),
    [
        (dict(microbatches=4), None, r"4 forward passes per optimizer step, planned for 1 \(StepSpec\(microbatches=4\)\)"),
        (dict(free=False), None, r"gradients were there .*StepSpec\(zero_grad='zero'\)"),
        (dict(), StepSpec(keeps_output=False), r"output stayed alive .*StepSpec\(keeps_output=True\)"),
        (dict(drop=True), None, r"below the .*output was dropped .*StepSpec\(keeps_output=False\)"),
        (dict(outside=True), StepSpec(keeps_output=True), r"computed outside of the model \(StepSpec\(loss_fn=...\)"),
        (dict(batch={"input_ids": IDS.repeat(2, 1), "labels": IDS.repeat(2, 1)}), None, r"batch was int64 \(8, 64\)"),
    ],
)  # fmt: skip
def test_a_loop_that_does_otherwise_is_told_once(
    loop: dict[str, Any], step: StepSpec | None, cause: str, said: Callable[[], list[str]]
) -> None:
    model = _model(step, ac="100%")
    _train(model, steps=4, **loop)
    (text,) = said()
    assert re.search(cause, text), text


def test_the_same_loop_is_told_the_same_however_often_it_was_measured(said: Callable[[], list[str]]) -> None:
    for _ in range(2):  # the second one finds what the profiler remembers of the first
        _train(_model(StepSpec(keeps_output=True), ac="100%"), outside=True)
    first, second = said()
    assert first == second


def test_another_optimizer_is_told(said: Callable[[], list[str]]) -> None:
    model = _model()
    _train(model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    (text,) = said()
    assert "below the" in text and "the step was that of sgd, planned for adamw" in text


def test_what_is_said_of_the_loop_is_believed(said: Callable[[], list[str]]) -> None:
    model = _model(StepSpec(microbatches=2, keeps_output=False, optimizer="sgd"))
    _train(model, microbatches=2, drop=True, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    assert said() == []


def test_evaluation_and_other_optimizers_are_not_counted(said: Callable[[], list[str]]) -> None:
    model, other = _model(), nn.Linear(2, 2)
    second = torch.optim.SGD(other.parameters(), lr=1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        second.step()
        _train(model, steps=1, optimizer=optimizer)
        with torch.no_grad():
            model(**BATCH)
    assert said() == []


def test_a_mode_is_not_watched_and_a_copy_neither() -> None:
    model = _model(ac="full")
    assert not any("_StepWatch" in repr(hook) for hook in model._forward_hooks.values())
    watched = _model()
    kept = len(first_step._watches)
    twin = copy.deepcopy(watched)
    assert pickle.loads(pickle.dumps([*twin._forward_hooks.values()][-1].__self__)) is not None
    assert len(first_step._watches) == kept
    _train(twin)  # the copy's hooks do nothing, and the model's own still wait
    _train(watched)
    assert len(first_step._watches) == kept - 1


def test_gradients_are_those_of_a_model_that_is_not_watched() -> None:
    found = []
    for ac in ("60%", "none"):
        model = _model(ac=ac)
        _train(model, steps=3)
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_loop_as_planned_has_no_cause() -> None:
    step = {"microbatches": 1, "zero_grad": "free", "keeps_output": True, "loss": "model", "optimizer": "adamw"}
    assert causes(step, Seen(forwards=1, output_kept=True, own_loss=True, optimizer="adamw-foreach")) == []
