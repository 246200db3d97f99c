"""How results are compared: a step's loss and gradients, equal to the bit, and errors by their text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def whole(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor. A collective for DTensors."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the whole gradients by the original model's names. A collective."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): whole(parameter.grad).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def loss_of(output: Any) -> Tensor:
    """Return the model's own loss where it has one, a scalar output itself, else the sum of an output's squares."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    return output if output.ndim == 0 else output.square().sum()


def step(model: nn.Module, *inputs: Any, seed: int = 0, **named: Any) -> dict[str, Tensor]:
    """Run forward and backward from `seed`; return the gradients by name and the loss as ``"loss"``."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = loss_of(model(*inputs, **named))
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def same(found: Any, expected: Any) -> bool:
    """Return if tensors, or mappings and sequences of them, are equal to the bit; other values by ``==``."""
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and torch.equal(whole(found), whole(expected))
    if isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def assert_bitwise(found: Any, expected: Any, where: object = "") -> None:
    """Fail with the names of the tensors, in mappings or sequences, that are not equal to the bit."""
    if isinstance(expected, list | tuple):
        found, expected = dict(enumerate(found)), dict(enumerate(expected))
    if not isinstance(expected, Mapping):
        found, expected = {"": found}, {"": expected}
    assert found.keys() == expected.keys(), where
    differ = [name for name, value in expected.items() if not same(found[name], value)]
    assert not differ, f"{where}: {differ} differ"


class Calls:
    """Pickled as a call of `function`, which a stranger's file could be."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def refused(text: str, error: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Any:
    """Expect `error` with `text`, which is no pattern, in its message."""
    return pytest.raises(error, match=re.escape(text))
