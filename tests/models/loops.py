"""Random training loops: what a person, a trainer or a fine-tuning library does between forwards and backwards.

A loop is a list of actions drawn by hypothesis. `run_loop` runs it on a model and returns all that can be seen from
outside after each action; the original model and a checkpointed one must give the same, to the bit, or the second an error.
"""

import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.checks import same
from tests.models.blocks import in_turn

WIDTH, LENGTH, LAYERS = 8, 6, 4
SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)

class LoopBlock(nn.Module):
    """A residual block, (B, T, D) to (B, T, D), with one habit that a replay could get wrong."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("a", "b")})
        self.active, self.strength, self.calls = "a", 1.0, 0
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.ones(WIDTH))
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor, seen: dict[str, Tensor]) -> Tensor:
        h = self.down(F.gelu(self.up(self.norm(x)))) * self.table * self.strength
        return x + HABITS[self.kind](self, h, seen)


def _counter(block: LoopBlock, h: Tensor, seen: dict[str, Tensor]) -> Tensor:
    block.calls += 1
    return (h * (1 + block.calls % 3)).tanh()


def _dict(block: LoopBlock, h: Tensor, seen: dict[str, Tensor]) -> Tensor:
    before = seen.get("sum")
    seen["sum"] = h if before is None else before + h
    return (h * seen["sum"]).tanh()


HABITS: dict[str, Callable[[LoopBlock, Tensor, dict[str, Tensor]], Tensor]] = {
    "plain": lambda block, h, seen: h,
    "dropout": lambda block, h, seen: F.dropout(h, 0.3, block.training),
    "counter": _counter,
    "coin": lambda block, h, seen: h.sin() if random.random() < 0.5 else h.cos(),
    "context": lambda block, h, seen: (h * SCALE.get()).sin(),
    "adapter": lambda block, h, seen: h + block.adapters[block.active](h.tanh()),
    "batch_norm": lambda block, h, seen: block.batch_norm(h.flatten(0, 1)).view_as(h),
    "dict": _dict,
    "inplace": lambda block, h, seen: (h * 1).mul_(0.5).relu_(),
    "refused": lambda block, h, seen: h.exp().mul_(0.5).relu_(),  # autograd has saved the exponential
    "generator": lambda block, h, seen: h * torch.rand(h.shape, generator=block.generator),
}
KINDS = tuple(HABITS)


class LoopModel(nn.Module):
    """`LoopBlock`s of the given kinds and a head; (B, T, D) to a scalar."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LoopBlock(kind) for kind in kinds)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(in_turn(self.layers, x, {})).float().square().mean()


@dataclass(frozen=True)
class Action:
    """One thing that happens; `layer` and `number` say to what and how."""

    what: str
    layer: int = 0
    number: int = 0


ACTIONS = (
    "forward", "forward", "forward", "backward", "backward", "backward_last", "step", "zero_grad", "clip", "evaluate",
    "train", "eval", "layer_eval", "switch_adapter", "strength", "freeze", "hook", "unhook", "table", "seed", "draw",
    "context", "scaled_backward", "retain", "grad_of_input", "new_linear", "bias_in_place",
)  # fmt: skip

loops = st.lists(
    st.builds(Action, st.sampled_from(ACTIONS), st.integers(0, LAYERS - 1), st.integers(0, 3)), min_size=3, max_size=14
)
models = st.lists(st.sampled_from(KINDS), min_size=LAYERS, max_size=LAYERS).map(tuple)


class _Loop:
    """The state of one loop: pending losses, an optimizer, hooks that were put on."""

    def __init__(self, model: nn.Module, reduce: Callable[[nn.Module], None] | None) -> None:
        self.model = model
        self.reduce = reduce
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.pending: list[Tensor] = []
        self.hooks: list[Any] = []
        self.count = 0

    def block(self, index: int) -> Any:
        return self.model.get_submodule(f"layers.{index}")

    def batch(self) -> Tensor:
        self.count += 1
        return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(self.count))

    def do(self, action: Action) -> list[Tensor]:
        return getattr(self, f"_{action.what}")(action.layer, action.number) or []

    def _forward(self, layer: int, number: int) -> list[Tensor]:
        self.pending.append(self.model(self.batch()))
        return [self.pending[-1].detach().clone()]

    def _backward(self, layer: int, number: int) -> list[Tensor]:
        if self.pending:
            self.pending.pop(0).backward()
        return self.gradients()

    def _backward_last(self, layer: int, number: int) -> list[Tensor]:
        if self.pending:
            self.pending.pop().backward()
        return self.gradients()

    def _scaled_backward(self, layer: int, number: int) -> list[Tensor]:
        if self.pending:
            (self.pending.pop(0) * 2.0 ** (number + 1)).backward()
        return self.gradients()

    def _retain(self, layer: int, number: int) -> list[Tensor]:
        if self.pending:
            self.pending[0].backward(retain_graph=True)
        return self.gradients()

    def _grad_of_input(self, layer: int, number: int) -> list[Tensor]:
        x = self.batch().requires_grad_()
        return list(torch.autograd.grad(self.model(x), [x]))

    def _step(self, layer: int, number: int) -> list[Tensor]:
        self.optimizer.step()
        return [p.detach().clone() for p in self.model.parameters()]

    def _zero_grad(self, layer: int, number: int) -> None:
        self.optimizer.zero_grad(set_to_none=number % 2 == 0)

    def _clip(self, layer: int, number: int) -> list[Tensor]:
        return [torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1 * (number + 1))]

    def _evaluate(self, layer: int, number: int) -> list[Tensor]:
        was = self.model.training
        self.model.eval()
        with torch.no_grad():
            loss = self.model(self.batch())
        self.model.train(was)
        return [loss]

    def _train(self, layer: int, number: int) -> None:
        self.model.train()

    def _eval(self, layer: int, number: int) -> None:
        self.model.eval()

    def _layer_eval(self, layer: int, number: int) -> None:
        self.block(layer).train(number % 2 == 0)

    def _switch_adapter(self, layer: int, number: int) -> None:
        for index in range(LAYERS):
            self.block(index).active = "ab"[number % 2]

    def _strength(self, layer: int, number: int) -> None:
        self.block(layer).strength = 0.5 + number

    def _freeze(self, layer: int, number: int) -> None:
        for parameter in self.block(layer).get_submodule("up").parameters():
            parameter.requires_grad_(number % 2 == 0)

    def _hook(self, layer: int, number: int) -> None:
        place = self.block(layer).get_submodule("norm")
        self.hooks.append(place.register_forward_hook(lambda module, args, out: out * (1 + 0.25 * number)))

    def _unhook(self, layer: int, number: int) -> None:
        if self.hooks:
            self.hooks.pop(number % len(self.hooks)).remove()

    def _table(self, layer: int, number: int) -> None:
        self.block(layer).table = torch.full((WIDTH,), 0.5 + number)

    def _seed(self, layer: int, number: int) -> None:
        torch.manual_seed(number)
        random.seed(number)

    def _draw(self, layer: int, number: int) -> list[Tensor]:
        return [torch.rand(number + 1), torch.tensor([random.random()])]

    def _context(self, layer: int, number: int) -> None:
        SCALE.set(1.0 + number)

    def _new_linear(self, layer: int, number: int) -> None:
        fresh = nn.Linear(WIDTH, 2 * WIDTH)
        fresh.load_state_dict({name: 0.1 * value.cos() for name, value in self.block(layer).up.state_dict().items()})
        self.block(layer).up = fresh

    def _bias_in_place(self, layer: int, number: int) -> None:
        with torch.no_grad():
            self.block(layer).get_submodule("down").bias.add_(0.125)

    def gradients(self) -> list[Tensor]:
        if self.reduce is not None:
            self.reduce(self.model)
        return [torch.zeros(0) if p.grad is None else p.grad.clone() for p in self.model.parameters()]


@dataclass
class Outcome:
    """What was seen after each action, up to the error that ended the loop, if one did."""

    seen: list[list[Tensor]]
    state: dict[str, Tensor]
    error: Exception | None = None


def run_loop(model: nn.Module, actions: list[Action], reduce: Callable[[nn.Module], None] | None = None) -> Outcome:
    """Run the actions on `model`. `reduce` averages gradients over ranks after each backward."""
    torch.manual_seed(0)
    random.seed(0)
    SCALE.set(1.0)
    loop = _Loop(model, reduce)
    seen: list[list[Tensor]] = []
    for action in actions:
        try:
            seen.append(loop.do(action))
        except Exception as error:  # noqa: BLE001 - which loops may raise is for the caller to say
            return Outcome(seen, {}, error)
    counters = {f"{i}.calls": torch.tensor(loop.block(i).calls) for i in range(LAYERS)}
    return Outcome(seen, {**{n: v.clone() for n, v in model.state_dict().items()}, **counters})


def differences(bare: Outcome, other: Outcome) -> list[str]:
    """Where `other` saw something else, up to its error; empty where it is the original model to the bit."""
    seen = enumerate(zip(other.seen, bare.seen, strict=False))
    found = [f"action {index}" for index, pair in seen if not same(*pair)]
    if bare.error is None and other.error is None:
        found += [name for name, value in bare.state.items() if not same(other.state[name], value)]
    return found
