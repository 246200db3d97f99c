"""Lists of names on ranks: gradients equal those of no checkpointing on the same axes, to the bit; the planner's bytes."""

from typing import Any

import pytest
import torch

from nemo_like import ContextParallel, Job, PipelineParallel, TensorParallel, parallelize
from nemo_like.activation_checkpointing.engine import region
from nemo_like.fake_rank import dry_run
from nemo_like.models import resolve_model
from tests.models.decoders import batch, build
from tests_distributed.spawn import run_ranks

LISTS: list[Any] = [
    {"save": ["attention", "self_attn.*_proj"], "offload": ["**.*_proj", "experts.1"]},
    {"save": ["attention", "attention.q", "attention.k", "attention.v", "residual", "statistics"]},
    {"recompute": ["self_attn", "*norm*"]},
    {"save": ["self_attn.o_proj.input", "mlp"]},
]


def _gradients(name: str, ac: Any, options: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """Return the gradients of two steps on this rank, and how many outputs the regions of the second kept."""
    ids = batch(2)
    sample, kept = {"input_ids": ids, "labels": ids.clone()}, 0
    drop = region.Region.drop_unreachable

    def note(self: Any) -> None:
        nonlocal kept
        drop(self)
        kept += sum(entry.decision.value in ("save", "host") for entry in self.kept)

    model = parallelize(build(name), ac=ac, precision=None, sample_input=sample if "pp" in options else None, **options)
    grads = []
    region.Region.drop_unreachable = note  # type: ignore[method-assign]
    try:
        for _ in range(2):
            model.zero_grad()
            kept = 0
            if "pp" in options:
                model.step(**{key: torch.cat([value, value]) for key, value in sample.items()})
            else:
                model(**sample).loss.backward()
            stages = [model] if "pp" not in options else [stage.module for stage in model.stages]
            for param in (param for stage in stages for param in stage.parameters()):
                if param.grad is not None:
                    grads.append(getattr(param.grad, "_local_tensor", param.grad).clone())
    finally:
        region.Region.drop_unreachable = drop  # type: ignore[method-assign]
    return grads, kept


def _compare(rank: int, world_size: int, name: str, options: dict[str, Any]) -> None:
    without, _ = _gradients(name, "none", options)
    assert without
    for ac in LISTS:
        grads, kept = _gradients(name, ac, options)
        assert len(grads) == len(without) and all(map(torch.equal, grads, without)), (name, options, ac)
        assert (kept > 0) == ("recompute" not in ac), (name, options, ac)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"tp": 2}),
        ("llama", {"tp": TensorParallel(2, sequence_parallel=True)}),
        ("llama", {"cp": 2}),
        ("mixtral", {"ep": 2}),
        ("llama", {"pp": PipelineParallel(2, "1f1b", microbatches=2)}),
        pytest.param("mixtral", {}, marks=pytest.mark.long),
        pytest.param("mixtral", {"tp": 2}, marks=pytest.mark.long),
        pytest.param("mixtral", {"cp": 2}, marks=pytest.mark.long),
        pytest.param("mixtral", {"pp": PipelineParallel(2, "1f1b", microbatches=2)}, marks=pytest.mark.long),
        pytest.param("llama", {"cp": ContextParallel(2, "ulysses")}, marks=pytest.mark.long),
        pytest.param("gemma3", {"tp": 2}, marks=pytest.mark.long),
        pytest.param("gemma3", {"cp": 2}, marks=pytest.mark.long),
    ],
)
def test_gradients_are_those_of_no_checkpointing(name: str, options: dict[str, Any]) -> None:
    run_ranks(2, _compare, name, options, timeout=240)


@pytest.mark.parametrize(
    ("ac", "options"),
    [
        ({"save": ["attention", "self_attn.*_proj"]}, {}),
        ({"save": ["**.input"]}, {"tp": TensorParallel(2, sequence_parallel=True)}),
        ({"recompute": ["mlp", "self_attn"], "save": ["mlp.gate_proj"]}, {}),
        pytest.param({"save": ["**.input"]}, {"cp": 2}, marks=pytest.mark.long),
        pytest.param([{"layers": "model.layers.[0-1]", "save": ["matmuls"]}, {"recompute": []}], {}, marks=pytest.mark.long),
    ],
)
def test_a_dry_run_peaks_as_planned_to_the_byte(ac: Any, options: dict[str, Any]) -> None:
    """The judge runs the job of one rank on fake CUDA tensors: engine, hooks, FSDP2 and two steps."""
    source = resolve_model("llama-tiny")
    job = Job.of(gpu="h100-80gb", world_size=4, ac=ac, precision="bf16", **options)
    checked = dry_run(source.build("meta"), job, source.sample_input(2, 64))
    assert checked.against == checked.peak_bytes
