"""What earlier steps taught about a module is good while it stays as it is: later changes are seen as in the first."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.engine.module_state import walk_of
from nemo_like.activation_checkpointing.policy import FullPolicy, SelectivePolicy

POLICIES = [FullPolicy(), SelectivePolicy()]


class Block(nn.Module):
    """Changes nothing of itself, as most layers. What is changed from outside is in `test_engine_world.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale, self.mode, self.config = 2.0, "a", SimpleNamespace(gain=3.0)
        self.other: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).tanh() * self.scale * self.config.gain
        return (y.sin() if self.mode == "a" else y.cos()).exp().tanh()


def _hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 3


@pytest.mark.parametrize("policy", POLICIES, ids=["full", "selective"])
def test_a_configuration_that_came_later_is_looked_at(policy: Any) -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 4, requires_grad=True)
    run_region(block, (x,), {}, policy=policy).sum().backward()
    block.config = SimpleNamespace(gain=0.5)
    (wanted,) = torch.autograd.grad(block(x).sum(), x)
    y = run_region(block, (x,), {}, policy=policy)
    block.config.gain = 4.0
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], wanted) and block.config.gain == 4.0


def test_what_the_replay_changes_is_taken_back_and_what_others_change_stays() -> None:
    torch.manual_seed(0)
    block = Block()
    x = torch.randn(2, 4, requires_grad=True)
    for _ in range(2):
        run_region(block, (x,), {}, policy=FullPolicy()).sum().backward()
    y = run_region(block, (x,), {}, policy=FullPolicy())
    block.mode, block.other = "b", "there"
    hook = block.inner.register_forward_hook(_hook)
    y.sum().backward()
    assert (block.mode, block.other, list(block.inner._forward_hooks)) == ("b", "there", [hook.id])


def test_the_walk_is_made_once_while_all_is_the_same() -> None:
    block = Block()
    walk = walk_of(block)
    attributes, registered = walk.attributes, walk.registered()
    assert walk_of(block) is walk and walk.attributes is attributes and walk.registered() is registered
    block.scale = 4.0
    assert walk_of(block) is walk and walk.attributes is attributes
    block.later = 1
    assert walk_of(block) is walk and walk.attributes is not attributes
    block.inner = nn.Linear(4, 4)
    assert walk_of(block) is not walk


@pytest.mark.parametrize("policy", POLICIES, ids=["full", "selective"])
def test_a_tensor_from_outside_that_is_changed_in_a_later_step_is_named(policy: Any) -> None:
    outside, x = torch.ones(4), torch.randn(2, 4, requires_grad=True)

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ((x.sin() * outside.detach()).exp() * 2).tanh()

    module = Reads()
    for _ in range(3):
        run_region(module, (x,), {}, policy=policy).sum().backward()
    y = run_region(module, (x,), {}, policy=policy)
    outside.add_(1)
    with pytest.raises(RegionError, match="was changed in place 0 times in forward, and 1 by now"):
        y.sum().backward()


@pytest.mark.parametrize("policy", POLICIES, ids=["full", "selective"])
def test_a_parameter_that_its_own_forward_begins_to_change_is_named(policy: Any) -> None:
    class Decays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.decays = False

        def forward(self, x: Tensor) -> Tensor:
            if self.decays:
                with torch.no_grad():
                    self.weight.mul_(0.5)
            return (x.sin() * self.weight).exp()

    module, x = Decays(), torch.randn(2, 4, requires_grad=True)
    for _ in range(3):
        run_region(module, (x,), {}, policy=policy).sum().backward()
    module.decays = True
    y = run_region(module, (x,), {}, policy=policy)
    with pytest.raises(RegionError, match=r"was changed in place \d times in forward, and \d by now"):
        y.sum().backward()


class Sines(nn.Module):
    """Has autograd save one tensor for each of `count` operators."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = x.sin()
        return x


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", POLICIES, ids=["full", "selective"])
def test_a_saved_tensor_costs_the_garbage_collector_three_objects(policy: Any) -> None:
    """A handle, the reference to it, a shape. With more, Python's collector would run in every step of a few layers."""
    x = torch.ones(3, requires_grad=True)

    def made(layer: nn.Module) -> int:
        gc.collect()
        gc.disable()  # a collection would free, and take tuples of numbers out of its own list
        try:
            before = len(gc.get_objects())
            out = run_region(layer, (x,), {}, policy=policy)  # and what it holds
            after = len(gc.get_objects())
            del out
            return after - before
        finally:
            gc.enable()

    def objects(count: int) -> int:
        layer = Sines(count)
        for _ in range(2):
            run_region(layer, (x,), {}, policy=policy).sum().backward()
        return made(layer)

    gc.freeze()  # what the tests before this one made is neither listed nor looked at
    try:
        assert objects(60) - objects(20) == 3 * 40
    finally:
        gc.unfreeze()
