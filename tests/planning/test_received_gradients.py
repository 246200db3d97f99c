"""The gradient of what a pipeline's stage sent on comes into a buffer that stays: nothing is added into it in place, and it
is there as long as the last layer's backward runs. By the CPU allocator's events."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nemo_like import Job
from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.options import StepSpec
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.model.traced import TracedPart
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.trace.layer_memory import backward_of_inputs, halves_memory
from tests.allocator_events import cpu_events
from tests.planning.queries import part_of

WIDTH, WIDE, ROWS = 32, 256, 512
HIDDEN = 4 * WIDTH * ROWS


class Scaled(nn.Module):
    """Granite's residuals: the gradient of the output goes into a product and to the next sum, to no weight. Most is alive
    behind that sum, in the wide part. Scaled by -1, for which no number is made a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.small = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (ROWS, WIDTH) -> the same
        x = x - self.two(torch.tanh(self.one(x)))
        return x - self.small(x)


class BothScaled(Scaled):
    """MiniMax's: nobody needs the gradient of the output when the products have their own."""

    def forward(self, x: Tensor) -> Tensor:  # (ROWS, WIDTH) -> the same
        x = -x - self.two(torch.tanh(self.one(x)))
        return -x - self.small(x)


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.start, self.layers = nn.Parameter(torch.zeros(WIDTH)), nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.start  # every layer makes a gradient of its input
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _part(block: Callable[[], nn.Module]) -> TracedPart:
    setup = Job.of(step=StepSpec(keeps_output=False))
    query = PlanQuery.of(Stack(block), {"x": torch.randn(ROWS, WIDTH)}, setup.change(gpu=resolve_device("cpu")))
    return part_of(query)


def _call(part: TracedPart, mode: str) -> Callable[[Tensor], Tensor]:
    """The second layer, as it runs in a step."""
    policy, layer = part.policy(0, part.uniform(mode)[1]), part.model.layers[1]
    return layer if policy is None else lambda x: run_region(layer, (x,), {}, policy=policy, preserve_rng_state=False)


@pytest.mark.parametrize("block", [Scaled, BothScaled])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_whole_backward(block: Callable[[], nn.Module], mode: str) -> None:
    part = _part(block)
    (choice,) = set(part.uniform(mode))
    given, received = (part.memory(0, choice, received=stays) for stays in (False, True))
    assert (received.output_grad, received.input_grad, received.held) == (HIDDEN, HIDDEN, given.held)
    assert received.backward_peak == given.backward_peak + HIDDEN
    call, stays = _call(part, mode), list[Tensor]()

    def step() -> None:
        out = call(given_x)
        stays.append(torch.ones_like(out))
        stays.append(out)  # torch's stage has it until backward has ended
        out.backward(stays[0])

    for _ in range(2):  # the first step compares a replay with its forward
        given_x = torch.randn(ROWS, WIDTH, requires_grad=True)
        part.model.zero_grad()
        stays.clear()
        alive = cpu_events(step)
    assert max(alive) == received.backward_peak + HIDDEN
    assert alive[-1] == 2 * HIDDEN + received.input_grad + received.param_grad


@pytest.mark.parametrize("block", [Scaled, BothScaled])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_backward_in_halves(block: Callable[[], nn.Module], mode: str) -> None:
    part = _part(block)
    (choice,) = set(part.uniform(mode))
    kind, policy, run = part.traced.kinds[0], part.policy(0, choice), part.traced.run
    given, received = (
        halves_memory(kind, policy, run, {0}, accumulate=False, received=stays) for stays in (False, True)
    )
    assert received.output_grad_between == received.input_grad == HIDDEN
    assert received.backward_peak == given.backward_peak + HIDDEN
    call, layer, stays, rest = _call(part, mode), part.model.layers[1], list[Tensor](), list[Callable[[], None]]()

    def first_half() -> None:
        out = call(given_x)
        stays.append(torch.ones_like(out))
        stays.append(out)
        rest.append(backward_of_inputs([out], stays[:1], [given_x], layer.parameters()))

    for _ in range(2):  # the first one learns what the layer draws and writes
        given_x = torch.randn(ROWS, WIDTH, requires_grad=True)
        part.model.zero_grad()
        stays.clear()
        alive = cpu_events(first_half)
        rest.pop()()
    assert max(alive) == received.backward_peak + HIDDEN
    assert alive[-1] == received.between + received.input_grad + HIDDEN
