"""Every field of a `Job`, and of the options in it, reaches the configurations of `fit`, or is refused by name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from nemo_like import Job
from nemo_like.options import (
    FSDP2,
    ChunkedLoss,
    ContextParallel,
    ExpertParallel,
    OffloadConfig,
    PipelineParallel,
    PlanSearch,
    Precision,
    StepSpec,
    TensorParallel,
)
from nemo_like.options.memory import AllocatorConfig
from nemo_like.planning.fit import fit
from tests.models.fit_models import llama, mixture
from tests.planning.queries import Text

pytest.importorskip("transformers")

PINS: dict[str, Any] = {"ac": "full", "loss": "model", "offload": "none", "micro_batch": 1, "cpu_offload": False}
PINS |= dict.fromkeys(("tp", "cp", "pp", "dp_replicate"), 1)


def rows_of(output: Any) -> Any:
    return output.logits.float().mean()


def counted(batch: Any) -> int:
    return batch["input_ids"].shape[0]


PLAN = {"model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise"} | {
    "model.layers.*.mlp.down_proj": "rowwise"
}
OPTIONS: dict[type, dict[str, Any]] = {
    FSDP2: {
        "reshard_after_forward": False,
        "forward_prefetch": 2,
        "backward_prefetch": 2,
        "cpu_offload": True,
        "frozen_sharding": "replicate",
        "timeout_seconds": 60.0,
    },
    TensorParallel: {"size": 2, "plan": PLAN, "sequence_parallel": True, "loss_parallel": True},
    ContextParallel: {"size": 2, "method": "ulysses", "loss_mean": "rows"},
    ExpertParallel: {
        "size": 2,
        "plan": {"model.layers.*.mlp.experts": "routed"},
        "imbalance": 1.2,
        "dispatch": "all_gather",
    },
    PipelineParallel: {
        "size": 2,
        "schedule": "gpipe",
        "microbatches": 4,
        "stages_per_rank": 2,
        "balance": "memory",
        "loss_mean": counted,
        "split": None,
    },
    ChunkedLoss: {
        "chunk_tokens": 64,
        "chunk_bytes": "1MiB",
        "grads_in_float32": False,
        "z_loss": 0.1,
        "compile": "aot_eager",
    },
    Precision: {
        "param_dtype": "bf16",
        "reduce_dtype": "bf16",
        "output_dtype": "float32",
        "cast_forward_inputs": False,
        "matmuls": "fp8",
    },
    OffloadConfig: {
        "mode": "boundary",
        "min_bytes": 1,
        "max_inflight_bytes": 1 << 20,
        "prefetch": 2,
        "pin_memory": False,
        "host_budget_bytes": 1 << 30,
    },
    StepSpec: {
        "sync": "last",
        "keeps_output": False,
        "zero_grad": "zero",
        "optimizer": "sgd",
        "loss_fn": rows_of,
        "ema": True,
    },
    AllocatorConfig: {
        "expandable_segments": True,
        "max_split_size": 1 << 30,
        "roundup_power2_divisions": 4,
        "large_segment": 32 << 20,
    },
    PlanSearch: {"host": True, "host_memory": 1 << 30, "measure": True},
}
"""A value of every option that differs from its default."""
WITH: dict[type, dict[str, Any]] = {
    TensorParallel: {"size": 2},
    ContextParallel: {"size": 2},
    ExpertParallel: {"size": 2},
    PipelineParallel: {"size": 2, "schedule": "interleaved_1f1b", "microbatches": 4},
    OffloadConfig: {"mode": "boundary"},
    Precision: {"param_dtype": "bf16"},
}
"""What an option needs beside it."""
FIELDS: dict[str, Any] = {
    "ac_scope": ("language",),
    "layers": ("model.layers.*",),
    "dp_replicate": 2,
    "compile": "aot_eager",
    "gpu": "a100-80gb",
}
HOLDERS = {
    "strategy": FSDP2, "tp": TensorParallel, "cp": ContextParallel, "ep": ExpertParallel, "pp": PipelineParallel,
    "loss": ChunkedLoss, "precision": Precision, "offload": OffloadConfig, "step": StepSpec, "allocator": AllocatorConfig,
    "search": PlanSearch,
}  # fmt: skip
OF_TRANSFORMERS = ("tp", "cp", "loss", "step", "layers", "ac_scope")
"""Fields that name or need what `Text` has not."""
CHOSEN = {"ac", "planned_tokens", "world_size", "device", "asked"}
"""What fit makes itself, and what only a run reads."""


def test_every_field_of_a_job_is_known_here():
    assert {field.name for field in fields(Job)} == set(FIELDS) | set(HOLDERS) | CHOSEN
    for holder, values in OPTIONS.items():
        chosen = {"microbatches"} if holder is StepSpec else set()
        assert {field.name for field in fields(holder)} == set(values) | chosen, holder


ALONE = {
    "strategy.cpu_offload", "tp.plan", "tp.sequence_parallel", "ep.plan", "pp.schedule", "search.measure",
}  # fmt: skip
"""Fields that are not asked for beside the others of their option."""


def _cases() -> list[Any]:
    cases = [pytest.param(name, value, id=name) for name, value in FIELDS.items()]
    for field, holder in HOLDERS.items():
        given = {name: value for name, value in OPTIONS[holder].items() if value is not None}
        together = {name: value for name, value in given.items() if f"{field}.{name}" not in ALONE}
        made = holder(**(WITH.get(holder, {}) | together))
        cases.append(pytest.param(field, made, id=f"{field}: {', '.join(together)}"))
        for name, value in given.items():
            marks = [] if f"{field}.{name}" in ALONE else [pytest.mark.long]
            made = holder(**(WITH.get(holder, {}) | {name: value}))
            cases.append(pytest.param(field, made, id=f"{field}.{name}", marks=marks))
    return cases


REFUSED = {
    "search.measure": "can't be measured for",
}
"""What no plan counts is refused with the reason."""


@pytest.mark.parametrize(("field", "value"), _cases())
def test_a_field_reaches_what_is_found(field: str, value: Any, request: pytest.FixtureRequest) -> None:
    model = mixture() if field == "ep" else llama(1) if field in OF_TRANSFORMERS else Text(4)
    pins = {name: pin for name, pin in PINS.items() if name != field}
    if field == "strategy":
        pins.pop("cpu_offload")
    case = request.node.callspec.id
    if case in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[case]):
            fit(model, gpus=4, seq_len=64, **{"gpu": "h100-80gb"} | pins | {field: value})
        return
    best = fit(model, gpus=4, seq_len=64, count=1, **{"gpu": "h100-80gb"} | pins | {field: value}).best
    got = getattr(best.job, field)
    if isinstance(value, StepSpec):
        value = replace(value, microbatches=got.microbatches)
    assert got == value
