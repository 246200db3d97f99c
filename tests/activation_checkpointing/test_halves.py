"""A backward in two halves, as pipeline schedules cut it: one replay, and nothing kept for longer than it is needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from nemo_like.activation_checkpointing.engine import checkpoint_region, half_of_backward
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy, SelectivePolicy

_forwards: list[weakref.ref[Tensor]] = []
"""What each forward made; out of the module's sight, whose attributes a replay puts back."""


class Two(nn.Module):
    """Two linear layers around an activation: the input of that is of use to the first half alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        _forwards.append(weakref.ref(wide))
        return self.down(F.silu(wide))


def _step(block: Two, x: Tensor, call: Callable[[Tensor], Tensor], told: bool = True) -> tuple[list[Tensor], bool]:
    """Gradients of the input and of the weights; whether the last forward's `wide` lived between the halves."""
    x = x.detach().requires_grad_()
    block.zero_grad()
    _forwards.clear()
    out = call(x)
    weights = [parameter for parameter in block.parameters() if parameter.requires_grad]
    with half_of_backward("inputs") if told else nullcontext():
        _, groups = stage_backward_input([out], [torch.ones_like(out)], [x], iter(weights))
    lives = _forwards[-1]() is not None
    with half_of_backward("weights") if told else nullcontext():
        stage_backward_weight(iter(weights), groups)
    return [t.grad for t in (x, *weights) if t.grad is not None], lives


@pytest.mark.parametrize("policy", [FullPolicy(), SelectivePolicy()], ids=["full", "selective"])
@pytest.mark.parametrize(("told", "forwards"), [(False, 3), (True, 2)])
def test_one_replay_for_both_halves_and_the_same_bits(policy: Policy, told: bool, forwards: int) -> None:
    torch.manual_seed(0)
    block = Two()
    for x in [torch.randn(4, 8) for _ in range(3)]:  # the first one learns
        wanted, _ = _step(block, x, block)
        got, _ = _step(block, x, lambda x: checkpoint_region(block, x, policy=policy), told)
        assert len(got) == 3 and all(map(torch.equal, got, wanted))
        assert len(_forwards) == forwards


def test_what_the_second_half_does_not_open_goes_with_the_first() -> None:
    torch.manual_seed(0)
    block = Two()

    def call(x: Tensor) -> Tensor:
        return checkpoint_region(block, x, policy=FullPolicy())

    lived = [_step(block, torch.randn(4, 8), call)[1] for _ in range(3)]
    assert lived == [True, False, False]  # the first step learns what the second half opens


def test_another_second_half_than_learned_replays_once_more() -> None:
    torch.manual_seed(0)
    block, x = Two(), torch.randn(4, 8)

    def call(x: Tensor) -> Tensor:
        return checkpoint_region(block, x, policy=FullPolicy())

    block.up.weight.requires_grad_(False)
    for _ in range(2):
        _step(block, x, call)
    # As many tensors are saved as before, but another layer needs its input: not what was learned.
    block.up.weight.requires_grad_(True)
    block.down.weight.requires_grad_(False)
    wanted, _ = _step(block, x, block)
    got, _ = _step(block, x, call)
    assert len(got) == 2 and all(map(torch.equal, got, wanted))
