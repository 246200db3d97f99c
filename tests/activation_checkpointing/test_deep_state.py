"""What a run changes in a model is back in its place after `restore`: values, objects, and which objects they are."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, UserDict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nemo_like.activation_checkpointing.engine.deep_state import take


class Schedule:
    """An object of a user's own class."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.step, self.history = model, 0, [0.0]


@dataclass(slots=True)
class Loads:
    rows: Tensor = field(default_factory=lambda: torch.zeros(3))
    calls: int = 0


class Everything(nn.Module):
    """Changes state of every kind in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.register_buffer("table", torch.zeros(4))
        self.register_buffer("late", None)
        self.view = self.table[:2]  # the same memory
        self.calls, self.array, self.counts = 0, np.zeros((2, 2)), Counter(a=1)
        self.queue, self.bytes, self.ordered = deque([1, 2], maxlen=2), bytearray(b"ab"), OrderedDict(a=1, b=2)
        self.pair = (torch.zeros(2), [1])
        self.loads, self.schedule, self.user = {"a": Loads()}, Schedule(self), UserDict(a=1)
        self.space = SimpleNamespace(inner=SimpleNamespace(n=1))
        self.python, self.numpy = random.Random(3), np.random.default_rng(3)
        self.torch = torch.Generator().manual_seed(3)
        self.adjacency = torch.eye(3).to_sparse()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.table += 1
        self.late = self.table * 2
        self.array += 1
        self.counts.update("ab")
        self.queue.append(3)
        self.bytes[0] += 1
        self.ordered.move_to_end("a")
        self.pair[0].add_(1)
        self.pair[1].append(2)
        self.loads["a"].rows += 1
        self.loads["a"].calls += 1
        self.loads["b"] = Loads()
        self.schedule.step += 1
        self.schedule.history.append(1.0)
        self.user["a"] += 1
        self.space.inner.n += 1
        self.adjacency.mul_(2)
        self.made = torch.ones(1)
        self.eval()
        self.train()
        self.linear.register_forward_hook(lambda *_: None)
        drawn = self.python.random() + self.numpy.random() + torch.rand((), generator=self.torch).item()
        y = self.norm(self.linear(x)) * drawn * self.calls
        self.losses.append(y.sum())
        self.linear.bias.requires_grad_(False)
        return y


def _described(model: Any) -> dict[str, Any]:
    """Everything in `model` as values, and the identity of what is in it."""
    found = {name: repr(value) for name, value in vars(model).items() if name not in ("python", "numpy", "torch")}
    found |= {name: str(value.tolist()) for name, value in model.state_dict().items()}
    found |= {f"{name}.requires_grad": value.requires_grad for name, value in model.named_parameters()}
    found |= {f"{name}.grad": repr(value.grad) for name, value in model.named_parameters()}
    found |= {"python": model.python.getstate(), "numpy": str(model.numpy.bit_generator.state)}
    found |= {
        "torch": model.torch.get_state().tolist(),
        "schedule": repr((model.schedule.step, model.schedule.history)),
    }
    found["hooks"] = len(model.linear._forward_hooks)
    places = ["table", "view", "array", "counts", "queue", "pair", "loads", "schedule", "adjacency"]
    found["identity"] = [id(getattr(model, name)) for name in places] + [id(model.loads["a"].rows)]
    return found


def test_all_that_a_run_changes_is_put_back_as_often_as_wanted() -> None:
    model = Everything()
    model(torch.randn(4, 3)).sum().backward()  # there are gradients already
    model.linear.requires_grad_(True)
    found, gradient = _described(model), model.linear.weight.grad
    before = take(model)
    for _ in range(2):
        for _ in range(2):
            model(torch.randn(4, 3)).sum().backward()
        assert sum(found[name] != value for name, value in _described(model).items() if name in found) > 20
        before.restore()
        assert _described(model) == found
        assert model.linear.weight.grad is gradient and model.view.data_ptr() == model.table.data_ptr()


def test_a_copy_goes_on_as_the_model_would_have() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 3), Everything()
    model(x).sum().backward()
    model.losses.clear()  # tensors with a graph cannot be copied
    before, plain = take(model), copy.deepcopy(model)
    model(torch.randn(4, 3)).sum().backward()
    before.restore()
    assert torch.equal(model(x), plain(x)) and model.calls == plain.calls == 2


def test_what_restores_nothing_writes_nothing() -> None:
    model = nn.BatchNorm1d(3)
    versions = [buffer._version for buffer in model.buffers()]
    before = take(model)
    before.restore()
    assert [buffer._version for buffer in model.buffers()] == versions
