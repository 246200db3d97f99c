"""LoRA adapters under tensor parallelism: the gradients of one process, and clear refusals of what cannot be cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nemo_like import parallelize
from nemo_like.distributed import get_model_state
from nemo_like.distributed.tensor.apply import apply_tensor_parallel
from nemo_like.options import TensorParallel
from tests_distributed.spawn import run_ranks
from tests_distributed.tensor.test_tensor_parallel import assert_same_step, batch, build, grads_of, loss_of

peft = pytest.importorskip("peft")

COLUMNS = ("q_proj", "v_proj", "gate_proj", "up_proj")
TARGETS = (*COLUMNS, "o_proj", "down_proj")
LARGE = {"init_lora_weights": False}
"""Factors that are not zero."""
BOTH = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])


def adapted(name: str = "llama", of: dict[str, Any] | None = None, **more: Any) -> nn.Module:
    model = build(name, **(of or {}))
    return peft.get_peft_model(model, peft.LoraConfig(**({"r": 4, "target_modules": list(TARGETS)} | LARGE | more)))


def split(model: nn.Module, sequence_parallel: bool = False, **options: Any) -> nn.Module:
    return parallelize(model, tp=TensorParallel(2, sequence_parallel=sequence_parallel), device="cpu", **options)


def whole_parts_differ(model: nn.Module) -> list[str]:
    """Names of gradients of whole parameters that ranks do not agree on to the bit."""
    differ = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
            first = parameter.grad.clone()
            torch.distributed.broadcast(first, 0)
            differ += [] if torch.equal(first, parameter.grad) else [name]
    return differ


def _step(rank: int, world_size: int, sequence_parallel: bool, more: dict[str, Any]) -> dict[str, str]:
    reference = adapted(**more)
    torch.manual_seed(5)
    expected = loss_of(reference, batch())
    expected.backward()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))["tp"]
    model = apply_tensor_parallel(adapted(**more), mesh, sequence_parallel=sequence_parallel)
    torch.manual_seed(5)
    loss = loss_of(model, batch())
    loss.backward()
    assert_same_step(model, loss.detach(), reference, expected.detach(), str(more))
    assert whole_parts_differ(model) == []
    return {
        name.removeprefix("base_model.model.model.layers.0."): str(p.placements[0]) if isinstance(p, DTensor) else "whole"
        for name, p in model.named_parameters()
    }
