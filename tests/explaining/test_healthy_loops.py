"""Loops of other kinds, which are in order: `explain` names no memory that should not be there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nemo_like import explain
from tests.explaining.taped import Taped
from tests.models.blocks import Layer

WIDTH, ROWS = 24, 64


class Net(nn.Module):
    """Four layers, and a table that the first forward makes, or a buffer that each forward makes again."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        sizes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
        self.layers = nn.ModuleList(
            Layer(lambda layer, x: x + layer.down(torch.relu(layer.up(x))), **{n: nn.Linear(*s) for n, s in sizes.items()})
            for _ in range(4)
        )
        self.kind, self.table = kind, None
        self.register_buffer("average", torch.zeros(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "table" and self.table is None:
            self.table = torch.randn(ROWS, WIDTH)
        if self.kind == "average":
            self.average = 0.9 * self.average + 0.1 * torch.randn(ROWS, WIDTH)
        for layer in self.layers:
            x = layer(x)
        return x + self.average if self.table is None else x + self.table


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def loss_of(model: nn.Module) -> Tensor:
    return model(batch()).square().mean()


def made(kind: str = "", name: str = "AdamW", **settings: Any) -> tuple[Net, Any]:
    model = Net(kind)
    return model, getattr(torch.optim, name)(model.parameters(), lr=1e-3, foreach=False, **settings)


def plain(kind: str = "", **settings: Any) -> None:
    model, optimizer = made(kind, **settings)
    for _ in range(5):
        model.zero_grad()
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()


def accumulated() -> None:
    model, optimizer = made()
    for number in range(12):
        (loss_of(model) / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def evaluated() -> None:
    model, optimizer = made()
    for _ in range(4):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model).item()


def two_models() -> None:
    (generator, first), (critic, second) = made(), made()
    for _ in range(4):
        fake = generator(batch())
        second.zero_grad()
        (critic(fake.detach()).mean() - critic(batch()).mean()).backward()
        second.step()
        first.zero_grad()
        (-critic(fake).mean()).backward()
        first.step()


def carried_state() -> None:
    model, optimizer = made()
    state = batch()
    for _ in range(5):
        optimizer.zero_grad()
        state = model(batch() + state)
        state.square().mean().backward()
        optimizer.step()
        state = state.detach()


def one_forward_one_backward() -> None:
    model, optimizer = made()
    for _ in range(3):
        losses = [loss_of(model)]
        for _ in range(3):
            losses.append(loss_of(model))
            losses.pop(0).backward()
        losses.pop().backward()
        optimizer.step()
        optimizer.zero_grad()


def next_batch_ahead() -> None:
    model, optimizer = made()
    ahead = batch().repeat(8, 1)
    for _ in range(5):
        now, ahead = ahead, batch().repeat(8, 1)
        optimizer.zero_grad()
        model(now[:ROWS]).square().mean().backward()
        optimizer.step()


def penalty_of_gradients() -> None:
    model, optimizer = made()
    for _ in range(4):
        x = batch().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        optimizer.zero_grad()
        gradient.square().mean().backward()
        optimizer.step()


def frozen_layers() -> None:
    model = Net()
    for layer in model.layers[1:]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.layers[0].parameters(), foreach=False)
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def generated() -> None:
    model, cache = Net(), []
    with torch.no_grad():
        for _ in range(12):
            cache.append(model(batch()))


def several_forwards_in_a_step() -> None:
    model = Net()
    optimizer, x = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=3), batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def recomputed() -> None:
    model, optimizer = made()
    for _ in range(4):
        optimizer.zero_grad()
        x: Any = batch().requires_grad_()
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "loop",
    [
        plain,
        lambda: plain("table"),
        lambda: plain("average"),
        lambda: plain(name="SGD", momentum=0.9),
        accumulated,
        evaluated,
        two_models,
        carried_state,
        one_forward_one_backward,
        next_batch_ahead,
        penalty_of_gradients,
        frozen_layers,
        generated,
        several_forwards_in_a_step,
        recomputed,
    ],
)
def test_a_loop_in_order_has_nothing_unexpected(loop: Callable[[], None]) -> None:
    torch.manual_seed(0)
    with Taped() as tape:
        loop()
        explained = explain(tape.made.snapshot())
    assert not explained.unexpected, explained.unexpected
    assert sum(explained.parts.values()) == explained.peak_bytes
