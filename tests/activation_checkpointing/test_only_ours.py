"""Checkpointing that somebody switches on after ours is refused: at that call, or at the next forward."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing as torch_checkpointing,
)

from nemo_like import apply_activation_checkpointing
from tests.models.decoders import batch, build, loss_of


def _enable(model: Any) -> None:
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_switched_on_after_ours_is_refused_at_that_call(ac: str) -> None:
    model = apply_activation_checkpointing(build("llama"), ac)
    with pytest.raises(ValueError, match=r"layers\.0\.gradient_checkpointing is True.*recomputed twice"):
        _enable(model)
    with pytest.raises(ValueError, match="recomputed twice"):
        loss_of(model, batch())  # the flags that were set on the way are found


@pytest.mark.parametrize("copied", [False, True])
def test_around_sub_modules_it_is_refused_at_the_next_forward(copied: bool) -> None:
    model = apply_activation_checkpointing(build("llama"), "submodule")
    loss_of(model, batch()).backward()
    if copied:
        model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    _enable(model)
    with torch.no_grad():
        loss_of(model, batch())
    with pytest.raises(ValueError, match=r"gradient_checkpointing is True.*gradient_checkpointing_disable"):
        loss_of(model, batch())
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    loss_of(model, batch()).backward()


def test_as_timm_switches_it_on() -> None:
    model = build("plain")
    model.grad_checkpointing = False
    apply_activation_checkpointing(model, "full")
    loss_of(model, batch())
    model.grad_checkpointing = True
    with pytest.raises(ValueError, match=r"grad_checkpointing is True.*set_grad_checkpointing\(False\)"):
        loss_of(model, batch())


@pytest.mark.parametrize("ac", ["full", "submodule"])
def test_pytorchs_wrapper_around_ours_is_refused_at_the_first_forward(ac: str) -> None:
    model = apply_activation_checkpointing(build("llama"), ac)
    layers = set(model.model.layers)
    torch_checkpointing(model, check_fn=lambda module: module in layers)
    with pytest.raises(ValueError, match=r"checkpoint_wrapper was put around .*layers\.0.*two wrappers nest"):
        loss_of(model, batch())


def test_pytorchs_wrapper_inside_ours_is_refused_at_the_first_forward() -> None:
    model = apply_activation_checkpointing(build("llama"), "full")
    torch_checkpointing(model, check_fn=lambda module: type(module).__name__ == "LlamaMLP")
    with pytest.raises(ValueError, match="two wrappers nest"):
        loss_of(model, batch())
