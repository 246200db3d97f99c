"""The class of a checkpointed layer: exchanged by a kernel library after `parallelize`, and found by its name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as TorchCheckpointWrapper

from nemo_like import parallelize
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper, unwrap_checkpoint_wrapper
from nemo_like.options import OffloadConfig
from tests.checks import assert_bitwise

D = 8
MODES = ["none", "full", "selective", "submodule", "sequential"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + 2 * self.mlp(self.norm(x))


class Other(nn.Module):
    """Not a subclass: it uses the same attributes."""

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mlp(self.norm(x))


class Linear2(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def _made_for(block: nn.Module) -> None:
    """As `torch.nn.utils.parametrize` and others do: a class that is made of the one that the layer reports."""
    own = block.__class__
    block.__class__ = type("Patched", (own,), {"forward": lambda self, x: own.forward(self, x) * 2})


SWAPS = {
    "layer": lambda block: setattr(block, "__class__", Twice),
    "not a subclass": lambda block: setattr(block, "__class__", Other),
    "made of the class": _made_for,
    "twice": lambda block: (_made_for(block), setattr(block, "__class__", Twice)),
    "inner": lambda block: setattr(block.mlp, "__class__", Linear2),
    "forward": lambda block: setattr(block, "forward", Twice.forward.__get__(block)),
}


def _results(swap: str, ac: str, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    if ac != "original":
        parallelize(model, "single", ac, device="cpu", **options)
    for block in model:
        SWAPS[swap](block)
    out = model(torch.ones(2, D))
    out.square().mean().backward()
    return [out, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("ac", MODES)
@pytest.mark.parametrize("swap", SWAPS)
def test_a_class_that_comes_after_checkpointing_runs(swap: str, ac: str) -> None:
    assert_bitwise(_results(swap, ac), _results(swap, "original"))


@pytest.mark.parametrize("swap", SWAPS)
def test_it_runs_inside_of_offloading_too(swap: str) -> None:
    offloaded = _results(swap, "full", offload=OffloadConfig("boundary", min_bytes=0))
    assert_bitwise(offloaded, _results(swap, "original"))


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_a_search_by_the_name_of_the_class_finds_the_layers(ac: str) -> None:
    model = parallelize(nn.Sequential(Block(), Block()), "single", ac, device="cpu")
    kinds = {type(block) for block in model}
    assert len(kinds) == 1, "Dynamo looks at classes"
    (kind,) = kinds
    assert (kind.__name__, kind.__qualname__) == ("Block", "Block")
    for block in model:
        assert isinstance(block, Block) and isinstance(block, TorchCheckpointWrapper)
    assert [name for name, m in model.named_modules() if type(m).__name__ == "Block"] == ["0", "1"]
    model[0].__class__ = Twice
    assert type(model[0]).__name__ == "Twice" and isinstance(model[0], Twice | CheckpointWrapper)
    assert type(model[1]) is kind


def test_copies_and_pickles_keep_the_class() -> None:
    wrapped: Any = CheckpointWrapper(nn.Sequential(Block(), Block()))
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert type(other) is type(wrapped) and len(other) == 2
        assert torch.equal(other(torch.ones(2, D)), wrapped(torch.ones(2, D)))
    assert type(unwrap_checkpoint_wrapper(wrapped)) is nn.Sequential
