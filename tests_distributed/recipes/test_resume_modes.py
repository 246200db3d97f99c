"""A sharded checkpoint with optimizer state, written under one mode and read under another: the losses go on bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from nemo_like import parallelize
from nemo_like.distributed import get_model_state, get_optimizer_state, set_model_state, set_optimizer_state
from tests.models.decoders import batch, build, loss_of
from tests_distributed.spawn import on_ranks

MODES = ("none", "full", "selective", "submodule", "sequential")


def _start(mode: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = parallelize(build("llama").eval(), ac=mode, device="cpu")
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95))


def _steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = loss_of(model, batch(2, 16, seed=2 * number + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ours: bool) -> dict[str, Any]:
    if ours:
        return {"model": get_model_state(model), "optimizer": get_optimizer_state(model, optimizer)}
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], ours: bool) -> None:
    if ours:
        set_model_state(model, state["model"])
        set_optimizer_state(model, optimizer, state["optimizer"])
    else:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@pytest.mark.long
@pytest.mark.parametrize("ours", [True, pytest.param(False, marks=pytest.mark.long)], ids=["nemo_like", "torch"])
@on_ranks(2, timeout=250)
def test_every_mode_reads_what_every_mode_wrote(rank: int, world_size: int, tmp_path: Path, ours: bool) -> None:
    folder = str(tmp_path)
    expected = _steps(*_start("none"), rank, range(4))
    wrong = []
    for written in MODES:
        model, optimizer = _start(written)
        assert _steps(model, optimizer, rank, range(2)) == expected[:2]
        dcp.save(_state(model, optimizer, ours), checkpoint_id=f"{folder}/{written}")
        for read in MODES:
            model, optimizer = _start(read)
            state = _state(model, optimizer, ours)
            dcp.load(state, checkpoint_id=f"{folder}/{written}")
            _load(model, optimizer, state, ours)
            if _steps(model, optimizer, rank, range(2, 4)) != expected[2:]:
                wrong.append(f"{written} to {read}")
        dist.barrier()
    assert not wrong, wrong
