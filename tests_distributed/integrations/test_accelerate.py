"""accelerate's FSDP2 on a model with ac=: every layer is a unit of its own, and the losses are the same.

accelerate offers FSDP on accelerators alone. Its own code is what runs here; only the kind of job that it has found is
renamed before it chooses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from nemo_like import apply_activation_checkpointing
from tests.models.decoders import batch, build, loss_of
from tests_distributed.spawn import on_ranks, run_ranks

pytest.importorskip("accelerate", reason="the integration is with accelerate")


def _prepared(ac: str, **settings: Any) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], **settings,
    )  # fmt: skip
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    assert accelerator.is_fsdp2
    model = apply_activation_checkpointing(build("llama").eval(), ac)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def _train(rank: int, world_size: int, ac: str) -> tuple[list[float], list[str]]:
    accelerator, model, optimizer = _prepared(ac)
    losses = []
    for step in range(3):
        loss = loss_of(model, batch(2, 16, seed=2 * step + rank))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, sorted({name for name, module in model.named_modules() if isinstance(module, FSDPModule)})


@pytest.mark.long
def test_every_layer_is_a_unit_in_every_mode() -> None:
    results = {
        ac: run_ranks(2, _train, ac, init_group=False, timeout=150)
        for ac in ("none", "full", "selective", "submodule", "sequential")
    }
    for losses, units in results["none"]:
        assert [name for name in units if "layers." in name] == [f"model.layers.{i}" for i in range(3)]
        assert losses[2] < losses[0]
    for ac, found in results.items():
        assert found == results["none"], ac


@pytest.mark.parametrize("ac", ["selective", "submodule"])
@on_ranks(2, init_group=False, timeout=150)
def test_accelerates_checkpointing_around_ours_is_refused(rank: int, world_size: int, ac: str) -> None:
    _, model, _ = _prepared(ac, activation_checkpointing=True)
    with pytest.raises(ValueError, match=r"fsdp_activation_checkpointing: true.*two wrappers nest"):
        loss_of(model, batch())
