"""Laws that every prediction keeps, whatever the model, the device and the options. No number in here is ours.

A draw is a model, a device, a size and options; traces are shared, so that a draw takes milliseconds.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nemo_like import Job
from nemo_like.options import ChunkedLoss
from nemo_like.planning.device_table import known_devices
from nemo_like.planning.devices import RATES, Device, calibrated, rates_file, resolve_device
from nemo_like.planning.predictions.rank import labels_at_peak, peak_of
from nemo_like.planning.predictions.seconds import step_seconds
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.utilisation import StepFlops
from tests.checks import on_meta
from tests.models.decoders import build

MODES = ("none", "selective", "full")
GPUS = tuple(name for name in known_devices() if name != "cpu")
SAME = 1e-9  # Sums of floats in another order.


@functools.cache
def model(name: str) -> nn.Module:
    """A model of the size of a real layer, so that kernels and not launches take the time; or a tiny one."""
    if name == "wide":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_attention_heads=8, num_key_value_heads=4, vocab_size=32_000,
            num_hidden_layers=2, use_cache=False, max_position_embeddings=65_536,
        )  # fmt: skip
        return on_meta(LlamaForCausalLM, config)
    return build(name).to("meta")


@functools.cache
def query(name: str, tokens: int, ranks: int, compiled: bool, precision: str | None, chunk: int | None) -> PlanQuery:
    """Return a query on an H100; `PlanQuery.under` asks it for other devices."""
    ids = torch.zeros(1, tokens, dtype=torch.long)
    job = Job.of(
        gpu="h100-80gb",
        world_size=ranks,
        precision=precision,
        compile="inductor" if compiled else None,
        loss=None if chunk is None else ChunkedLoss(chunk),
        optimizer="adamw-fused",
    )
    return PlanQuery.from_model(model(name), {"input_ids": ids, "labels": ids}, job)


@functools.cache
def on(device: str, *asked: Any) -> PlanQuery:
    """Return `query` on a device of the table."""
    first = query(*asked)
    return first.under(first.job.change(gpu=device))


@functools.cache
def found(device: str, mode: str, *asked: Any) -> tuple[float, int]:
    """Return the seconds of a step and the bytes of its peak."""
    of = on(device, *asked)
    choices = of.uniform(mode)
    return step_seconds(of, choices).total, peak_of(of, choices).total


JOBS: dict[str, Any] = {
    "name": st.sampled_from(["wide", "llama", "mixtral"]),
    "tokens": st.sampled_from([512, 2048]),
    "ranks": st.sampled_from([1, 2, 8]),
    "compiled": st.booleans(),
    "precision": st.sampled_from([None, "bf16"]),
    "chunk": st.sampled_from([None, 128, 512]),
}


def _sums(gpu: str, mode: str, **job: Any) -> None:
    of = on(gpu, *job.values())
    choices = of.uniform(mode)
    step = step_seconds(of, choices)
    assert sum(step.parts.values()) == pytest.approx(step.total, rel=SAME) and min(step.parts.values()) >= 0
    assert sum(labels_at_peak(of, 0, choices).values()) == peak_of(of, choices).total


def _flops(gpu: str, mode: str, **job: Any) -> None:
    device = resolve_device(gpu)
    if job["name"] == "mixtral" or job["precision"] is None:  # few of its weights multiply; float32 has another peak
        return
    flops = StepFlops.count(model(job["name"])).of(job["tokens"])
    fastest = max(device.peak_flops, device.matmul_flops["half"])
    assert found(gpu, mode, *job.values())[0] >= flops / fastest * (1 - SAME)


def _tokens(gpu: str, mode: str, **job: Any) -> None:
    once, twice = (found(gpu, mode, *(job | {"tokens": job["tokens"] * times}).values()) for times in (1, 2))
    assert once[0] <= twice[0] * (1 + SAME) and once[1] <= twice[1]
    assert twice[0] <= 4 * once[0] * (1 + SAME) and twice[1] <= 4 * once[1]


def _ranks(gpu: str, mode: str, **job: Any) -> None:
    sharded = [on(gpu, *(job | {"ranks": ranks}).values()).stages[0].sharding for ranks in (2, 4, 8)]
    state = [sum(param.size for param in sharding.trained) for sharding in sharded]
    assert state == sorted(state, reverse=True)


def _recomputed(gpu: str, mode: str, **job: Any) -> None:
    of = on(gpu, *job.values())
    seconds = {mode: step_seconds(of, of.uniform(mode)).parts.get("replay", 0.0) for mode in MODES}
    held = {mode: sum(choice.held_bytes for choice in of.uniform(mode)[0]) for mode in MODES}
    assert seconds["none"] == 0
    for less, more in (("full", "selective"), ("selective", "none")):
        assert held[less] <= held[more] and seconds[less] >= seconds[more] * (1 - SAME)


def _chunks(gpu: str, mode: str, **job: Any) -> None:
    small, large = (found(gpu, mode, *(job | {"chunk": chunk}).values())[0] for chunk in (128, 512))
    assert small >= large * (1 - SAME)


def _compiled(gpu: str, mode: str, **job: Any) -> None:
    eager, compiled = (found(gpu, mode, *(job | {"compiled": compiled}).values()) for compiled in (False, True))
    assert compiled[0] <= eager[0] * (1 + SAME)


LAWS: dict[str, Callable[..., None]] = {
    "parts sum to the step, and labels to the peak": _sums,
    "no step is faster than its FLOPs at the peak": _flops,
    "twice the tokens take no less, and at most four times as much": _tokens,
    "more ranks hold no more state": _ranks,
    "a mode that keeps more recomputes no more": _recomputed,
    "smaller chunks of a loss are never faster": _chunks,
    "compiled layers are never slower": _compiled,
}


def check(law: str, draws: int, **fixed: Any) -> None:
    drawn = given(gpu=st.sampled_from(GPUS), mode=st.sampled_from(MODES), **JOBS | fixed)(LAWS[law])
    settings(max_examples=draws, deadline=None)(drawn)()


@pytest.mark.parametrize("law", LAWS)
def test_a_law_holds(law: str) -> None:
    check(law, 10, name=st.just("llama"), precision=st.just("bf16"), compiled=st.just(False), tokens=st.just(512))


@pytest.mark.long
@pytest.mark.parametrize("law", LAWS)
def test_a_law_holds_for_2000_draws_in_all(law: str) -> None:
    check(law, 2000 // len(LAWS) + 1)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_calibration_with_the_rates_of_the_table_changes_nothing(
    gpu: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_LIKE_CACHE", str(tmp_path))
    device = resolve_device(gpu)
    path = rates_file(device)
    assert path is not None
    path.parent.mkdir()
    rates = {name: _rate(device, *where) for name, where in RATES.items()}
    path.write_text(json.dumps({"rates": rates, "measured": "now", "torch": "2.13"}))
    after = calibrated(device)
    assert after.rates != device.rates
    assert {**vars(after), "rates": ""} == {**vars(device), "rates": ""}


def _rate(device: Device, field: str, entry: str | None) -> float:
    value = getattr(device, field)
    return float(value if entry is None else value[entry])
