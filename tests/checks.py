"""How models are built, trained by a step, and compared: loss and gradients, to the bit, and errors by their text."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn


def seeded(make: Callable[..., Any], *given: Any, seed: int = 0, **named: Any) -> Any:
    """Return ``make(*given, **named)``, which draws its random numbers from `seed`."""
    torch.manual_seed(seed)
    return make(*given, **named)


def on_meta(make: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Return ``make(*given, **named)``, made on the meta device."""
    with torch.device("meta"):
        return make(*given, **named)


def labelled(ids: Tensor) -> dict[str, Tensor]:
    """Return a batch of token numbers that are their own labels."""
    return {"input_ids": ids, "labels": ids}


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


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the whole parameters by name. A collective."""
    return {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def loss_of(output: Any) -> Tensor:
    """Return the model's own loss where it has one, a scalar output itself, else the sum of an output's squares."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    return output if output.ndim == 0 else output.square().sum()


def backward(loss: Tensor) -> Tensor:
    """Run backward from `loss`, and return it without its graph."""
    loss.backward()
    return loss.detach()


def step(model: nn.Module, *inputs: Any, seed: int = 0, **named: Any) -> dict[str, Tensor]:
    """Run forward and backward from `seed`; return the gradients by name and the loss as ``"loss"``."""
    model.zero_grad()
    torch.manual_seed(seed)
    return {"loss": backward(loss_of(model(*inputs, **named))), **gradients_of(model)}


def update(optimizer: Any) -> None:
    """Step, and take the gradients away."""
    optimizer.step()
    optimizer.zero_grad()


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean of all ranks' tensors. A collective."""
    mean = value.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def same(found: Any, expected: Any) -> bool:
    """Return if tensors, or mappings and sequences of them, are equal to the bit and in dtype; other values by ``==``."""
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and found.dtype == expected.dtype and torch.equal(whole(found), whole(expected))
    if isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def assert_bitwise(found: Any, expected: Any, where: object = "") -> None:
    """Fail with the names of the tensors, in mappings or sequences, that are not equal to the bit."""
    found, expected = _by_name(found, expected)
    assert found.keys() == expected.keys(), where
    differ = [name for name, value in expected.items() if not same(found[name], value)]
    assert not differ, f"{where}: {differ} differ"


def assert_near(found: Any, expected: Any, tolerance: float = 1e-5, where: object = "", least: float = 1e-12) -> None:
    """Fail with the names of the tensors, in mappings or sequences, that are off by more than `tolerance` of their norm.

    least: what a smaller norm counts as, for gradients that are zero but for rounding.
    """
    found, expected = _by_name(found, expected)
    assert found.keys() == expected.keys(), where
    norms = {name: value.float().norm().clamp(min=least) for name, value in expected.items()}
    errors = {name: float((whole(found[name]) - value).float().norm() / norms[name]) for name, value in expected.items()}
    off = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not off, f"{where}: {off}"


def _by_name(found: Any, expected: Any) -> tuple[Mapping[Any, Any], Mapping[Any, Any]]:
    if isinstance(expected, list | tuple):
        return dict(enumerate(found)), dict(enumerate(expected))
    return (found, expected) if isinstance(expected, Mapping) else ({"": found}, {"": expected})


@contextmanager
def refused_unchanged(model: nn.Module, match: str, error: Any = ValueError) -> Iterator[None]:
    """Expect `error` inside, and that it leaves the modules of `model` as they were."""
    before = dict(model.named_modules())
    with pytest.raises(error, match=match):
        yield
    assert dict(model.named_modules()) == before


class Calls:
    """Pickled as a call of `function`, which a stranger's file could be."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def refused(text: str, error: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Any:
    """Expect `error` with `text`, which is no pattern, in its message."""
    return pytest.raises(error, match=re.escape(text))
