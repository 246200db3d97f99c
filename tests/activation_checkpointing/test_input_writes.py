"""Regions that change their own inputs in place, as Mixtral's router does with noise: replay finds them as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import parallelize
from nemo_like.activation_checkpointing import SelectivePolicy
from nemo_like.activation_checkpointing.engine import RegionError
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper
from tests.checks import assert_bitwise
from tests.models.families import FAMILIES

D = 8
POLICIES = [FullPolicy(), SelectivePolicy(), SelectivePolicy(every_nth_matmul=None)]


class Noisy(nn.Module):
    """Its noise comes in place, and from the second call on only if it says so: `learnt` from the first is not enough."""

    def __init__(self, on: tuple[int, ...]) -> None:
        super().__init__()
        self.linear, self.on, self.calls = nn.Linear(D, D), on, 0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.calls in self.on:
            x *= torch.empty_like(x).uniform_(0.9, 1.1) if scale is None else scale
        self.calls += 1
        return self.linear(x).tanh() * x


class Model(nn.Module):
    def __init__(self, policy: Policy | None, on: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.noisy = nn.Linear(D, D), nn.Linear(D, D), Noisy(on)
        if policy is not None:
            self.noisy = CheckpointWrapper(self.noisy, policy=policy)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(self.noisy(h) + h)


def gradients(model: nn.Module, backwards: int = 1) -> list[Tensor]:
    for seed in range(3):
        model.zero_grad()
        torch.manual_seed(seed)
        loss = model(torch.randn(3, D)).square().sum()
        for _ in range(backwards - 1):
            loss.backward(retain_graph=True)
        loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_of_the_bare_model(policy: Policy, backwards: int) -> None:
    assert_bitwise(gradients(Model(policy), backwards), gradients(Model(None), backwards))


def test_a_policy_that_keeps_something_notices_a_late_change_too() -> None:
    assert_bitwise(gradients(Model(SelectivePolicy(), on=(2,))), gradients(Model(None, on=(2,))))


def _late() -> None:
    gradients(Model(FullPolicy(), on=(2,)))  # operators are no longer watched


def _shared_memory() -> None:
    base = nn.Linear(D, D)(torch.ones(4, D))  # inputs that share memory are not copied apart
    CheckpointWrapper(Noisy(on=(0,)), policy=FullPolicy())(base[:2], base[:2].detach()).sum().backward()


def _by_the_caller() -> None:
    h = nn.Linear(D, D)(torch.ones(2, D))
    loss = CheckpointWrapper(Noisy(on=()), policy=FullPolicy())(h).sum()
    h.mul_(2)
    loss.backward()


@pytest.mark.parametrize("change", [_late, _shared_memory, _by_the_caller])
def test_a_change_that_cannot_be_made_again_is_an_error(change: Callable[[], None]) -> None:
    with pytest.raises(RegionError, match="one of its inputs was changed in place"):
        change()


@pytest.mark.parametrize("ac", ["full", "selective", "submodule", "sequential"])
@pytest.mark.parametrize(
    "settings", [{"router_jitter_noise": 0.1}, {"output_router_logits": True}], ids=["jitter", "router loss"]
)
def test_mixtral(settings: dict[str, Any], ac: str) -> None:
    pytest.importorskip("transformers")

    def run(ac: str | None) -> list[Tensor]:
        model = FAMILIES["mixtral"].build()
        for name, value in settings.items():
            setattr(model.config, name, value)
        for module in model.modules():
            if hasattr(module, "jitter_noise"):
                module.jitter_noise = model.config.router_jitter_noise
        model = model if ac is None else parallelize(model, "single", ac)
        for _ in range(2):
            model.zero_grad()
            FAMILIES["mixtral"].step(model).backward()
        return [p.grad for p in model.parameters()]

    assert_bitwise(run(ac), run(None))


class Twice(nn.Module):
    """Is given one tensor in two places: attention takes another way then, and a write into one is seen in the other."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.one, self.other, self.writes = nn.Linear(D, D), nn.Linear(D, D), writes

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        if self.writes:
            query *= 1.5
        return self.one(query).tanh() * key if query is key else self.other(query + key)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_tensor_in_two_places_is_one_in_recomputation(policy: Policy, hooks: bool, writes: bool) -> None:
    def gradients_of(policy: Policy | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        first, twice = nn.Linear(D, D), Twice(writes)
        layer = twice if policy is None else CheckpointWrapper(twice, policy=policy)
        around = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with around if hooks else contextlib.nullcontext():
            h = first(torch.randn(3, D)) * 1.0
            layer(h, h).square().sum().backward()
        return [parameter.grad for parameter in (*first.parameters(), *twice.parameters())]

    assert_bitwise(gradients_of(policy), gradients_of(None))
