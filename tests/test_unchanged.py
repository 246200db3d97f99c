"""A call that is refused leaves the model untouched: its modules, parameters, hooks, flags and config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from nemo_like import (
    CheckpointConfig,
    MemoryBudget,
    PlanSearch,
    SelectivePolicy,
    apply_activation_checkpointing,
    parallelize,
)
from nemo_like.options import FSDP2, OffloadConfig, Precision, TensorParallel
from nemo_like.planning import plan_for
from tests.models.decoders import PlainDecoder, batch, build

IDS = batch(2)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def everything_of(model: nn.Module) -> list[Any]:
    """All that a call could have changed, as values that compare."""
    rows: list[Any] = []
    for name, module in model.named_modules():
        hooks = [(kind, tuple(getattr(module, kind))) for kind in _HOOKS]
        attributes = sorted(key for key in vars(module) if not key.startswith("_"))
        forward = id(vars(module).get("forward"))
        rows.append((name, id(module), type(module), module.training, hooks, attributes, forward))
    rows += [(name, id(p), p.dtype, p.device, p.requires_grad, p._version) for name, p in model.named_parameters()]
    rows += [(name, id(b), b.dtype, b.device, b._version) for name, b in model.named_buffers()]
    config = getattr(model, "config", None)
    rows.append(None if config is None else config.to_dict())
    return rows


class Linears(nn.Module):
    """Repeated layers without an MLP, attention or norm of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _own_checkpointing() -> nn.Module:
    model = build("llama")
    model.gradient_checkpointing_enable()
    return model


def _plan_of_another() -> dict[str, Any]:
    return dict(
        ac=plan_for(
            build("llama"),
            ac="100%",
            sample_input={"input_ids": IDS, "labels": IDS},
            gpu="h100-80gb",
            search=PlanSearch(skip=False),
        )
    )


def _config(**fields: Any) -> CheckpointConfig:
    return CheckpointConfig(enabled=True, profile_before_apply=False, **fields)


# (arguments or what makes them, model): in both calls, as far as `apply_activation_checkpointing` has the argument.
Case = tuple[dict[str, Any] | Callable[[], dict[str, Any]], Callable[[], nn.Module]]


def _of_ac() -> Iterator[tuple[str, Case]]:
    plain: Callable[[], nn.Module] = PlainDecoder
    words = ("selectiv", "", "fulll", "sub module", "40GiBB", "120%", "-5GiB", "0GiB", "ten%")
    for word in words:
        yield f"ac={word!r}", (dict(ac=word, sample_input=IDS), plain)
    for value in (3, 3.5, object(), SelectivePolicy, CheckpointConfig, ["full"], {"strategy": "full"}, b"full"):
        yield f"ac={type(value).__name__}:{getattr(value, '__name__', '')}", (dict(ac=value), plain)
    yield "budget without a sample input", (dict(ac="50%"), plain)
    yield "auto without a sample input", (dict(ac="auto"), plain)
    yield "MemoryBudget without a sample input", (dict(ac=MemoryBudget(fraction=0.5)), plain)
    yield "budget that nothing meets", (dict(ac="1KiB", sample_input=IDS), plain)
    yield "share that nothing meets", (dict(ac="0%", sample_input=IDS), plain)
    yield "sample input that the model cannot take", (dict(ac="50%", sample_input={"no_such": IDS}), plain)
    yield "sample input of a wrong dtype", (dict(ac="50%", sample_input=torch.ones(2, 16)), plain)
    yield "sample input that is text", (dict(ac="50%", sample_input="text"), plain)
    yield "profile of a bad sample", (dict(ac=CheckpointConfig(enabled=True), sample_input={"no_such": IDS}), plain)
    yield "plan for another model", (_plan_of_another, plain)
    yield "more segments than layers", (dict(ac=_config(strategy="sequential", sequential_segments=9)), plain)
    yield "no such class", (dict(ac=_config(layer_classes=["LlamaDecoderLayer"])), plain)
    yield "no such include", (dict(ac=_config(include_patterns=["layers.*"])), plain)
    yield "no such exclude", (dict(ac=_config(exclude_patterns=["layers.*"])), plain)
    yield "no timesteps", (dict(ac=_config(snn_timestep_checkpoint=True)), plain)
    yield "submodule of plain linear layers", (dict(ac="submodule"), Linears)
    yield "no layers", (dict(ac="full"), lambda: nn.Linear(4, 4))
    yield "checkpoints itself", (dict(ac="none"), _own_checkpointing)
    yield "checkpointed already", (dict(ac="full"), lambda: apply_activation_checkpointing(PlainDecoder(), "submodule"))
    yield "layers: no such name", (dict(layers=["layers.*"]), plain)
    yield "layers: foreign module", (dict(layers=[nn.Linear(2, 2)]), plain)
    yield "layers: overlap", (dict(layers=["blocks.0", "blocks.0.mlp"]), plain)
    yield "layers: number", (dict(layers=[3]), plain)
    yield "compile: no such backend", (dict(compile="inducter"), plain)
    yield "compile: number", (dict(compile=3), plain)
    yield "reentrant and compiled", (dict(ac=_config(strategy="full", use_reentrant=True), compile=True), plain)


def _of_parallelize() -> Iterator[tuple[str, Case]]:
    plain: Callable[[], nn.Module] = PlainDecoder
    bad: dict[str, dict[str, Any]] = {
        "strategy": dict(strategy="fsdp3"), "strategy: number": dict(strategy=2), "strategy: None": dict(strategy=None),
        "scope": dict(ac_scope="langauge"), "scope: nothing there": dict(ac_scope="vision"),
        "scope: empty": dict(ac_scope=[]), "scope: number": dict(ac_scope=3), "mesh": dict(mesh="dp"),
        "dp_replicate on one rank": dict(dp_replicate=2), "tp on one rank": dict(tp=2),
        "tp beside ddp": dict(strategy="ddp", tp=2), "tp: zero": dict(tp=0), "tp: fraction": dict(tp=1.5),
        "tp: sequence parallel alone": dict(tp=TensorParallel(sequence_parallel=True)),
        "tp: loss parallel alone": dict(tp=TensorParallel(loss_parallel=True)),
        "precision": dict(precision="bf17"), "precision: integer": dict(precision=torch.int8),
        "precision: number": dict(precision=16), "precision: autocast has it not": dict(precision=torch.float64),
        "precision: policy": dict(precision=MixedPrecisionPolicy(param_dtype=torch.float64)),
        "offload": dict(offload="disk"), "offload: number": dict(offload=3),
        "offload saved of nothing": dict(offload="saved", ac="none"),
        "offload config of nothing": dict(offload=OffloadConfig("saved"), ac="none"),
        "optimizer": dict(optimizer="adamm"), "device": dict(device="tpu"), "device: meta": dict(device="meta"),
        "device: no cuda": dict(device="cuda:99"), "device: no mps": dict(device="mps"),
        "device: no xpu": dict(device="xpu"), "device: number": dict(device=3.5),
    }  # fmt: skip
    for name, arguments in bad.items():
        yield name, (arguments, plain)


_AC, _PARALLELIZE = dict(_of_ac()), dict(_of_parallelize())
BAD_CALLS = [(call, name) for call in ("apply", "parallelize") for name in _AC]
BAD_CALLS += [("parallelize", name) for name in _PARALLELIZE]


def test_there_are_at_least_sixty() -> None:
    assert len(BAD_CALLS) >= 60


@pytest.mark.parametrize(("call", "name"), BAD_CALLS)
def test_a_refused_call_changes_nothing(call: str, name: str) -> None:
    made, build_model = (_AC | _PARALLELIZE)[name]
    arguments = made() if callable(made) else made
    model = build_model()
    before = everything_of(model)
    with pytest.raises((ValueError, TypeError)):
        (parallelize if call == "parallelize" else apply_activation_checkpointing)(model, **arguments)
    assert everything_of(model) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: FSDP2(reshard_after_forward="yes"), lambda: FSDP2(reshard_after_forward=-1),
        lambda: FSDP2(forward_prefetch=-1),
        lambda: FSDP2(backward_prefetch=True), lambda: FSDP2(cpu_offload=1), lambda: FSDP2(frozen_sharding="nowhere"),
        lambda: TensorParallel(0), lambda: TensorParallel(2, plan="auto"), lambda: TensorParallel(2, sequence_parallel=1),
        lambda: Precision("bf17"), lambda: Precision(reduce_dtype=torch.int32), lambda: OffloadConfig("disk"),
        lambda: MemoryBudget(), lambda: MemoryBudget(1, 0.5), lambda: MemoryBudget(peak_bytes="40GiB"),
        lambda: MemoryBudget(fraction=1.5), lambda: MemoryBudget(peak_bytes=0), lambda: MemoryBudget(device_share=2),
        lambda: CheckpointConfig(policy=SelectivePolicy),
        lambda: CheckpointConfig(strategy="full", policy=SelectivePolicy()),
        lambda: CheckpointConfig(policy=SelectivePolicy(), ops_to_save=["aten.mm"]),
    ],
)  # fmt: skip
def test_options_check_themselves_when_they_are_made(make: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        make()
