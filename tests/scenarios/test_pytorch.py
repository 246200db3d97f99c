"""Scenarios by role, written anew from the *cases* of PyTorch's own tests of `torch.utils.checkpoint`:

`TestCheckpoint` in `test/test_utils.py` (the function and its sequential form), and
`test/distributed/_composable/test_checkpoint.py` (a module that is checkpointed in place).

Left out: the argument checks of `checkpoint_sequential` (we have no such function); how a device type is inferred and the
states of several GPUs are collected (private helpers of theirs); the refusal of double backward (only the re-entrant
form has it) and the smaller graph of that form.
Different on purpose: in `sequential` the last segment is replayed too, where PyTorch leaves it alone; a region of which
no output needs a gradient raises autograd's own error in backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import CheckpointConfig, apply_activation_checkpointing
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing import CheckpointSpec, FullPolicy, SelectivePolicy, apply_specs
from tests.checks import assert_bitwise
from tests.models.blocks import checkpoint_region, gradients, region

each_policy = pytest.mark.parametrize("policy", [FullPolicy(), SelectivePolicy()], ids=["full", "selective"])


def replayed(fn: Callable[..., Any]) -> Callable[..., Any]:
    return region(fn, FullPolicy())


class Counting(nn.Module):
    """Doubles its input, with a product that autograd saves, and counts its calls, within itself and outside."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight, self.number, self.calls = nn.Parameter(torch.ones(())), number, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        RUN[self.number] += 1
        return x * self.weight * 2


RUN: dict[int, int] = {}


def test_each_layer_of_a_segment_runs_again_once() -> None:
    RUN.update(dict.fromkeys(range(10), 0))
    model = nn.Sequential(*(Counting(number) for number in range(10)))
    config = CheckpointConfig(enabled=True, strategy="sequential", sequential_segments=2, profile_before_apply=False)
    apply_activation_checkpointing(model, config, layers=["*"])
    out = model(torch.randn(3, 4, requires_grad=True))
    assert list(RUN.values()) == [1] * 10
    out.sum().backward()
    assert list(RUN.values()) == [2] * 10
    # A module's own count is put back after replay: it says what the bare model's would.
    assert [layer.calls for layer in model] == [1] * 10


class Chain(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("chain", [lambda layers: nn.Sequential(*layers), Chain], ids=["Sequential", "ModuleList"])
def test_a_chain_in_two_segments(chain: Callable[[list[nn.Module]], nn.Module], order: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    bare, model = chain(copy.deepcopy(layers)), chain(layers)
    config = CheckpointConfig(enabled=True, strategy="sequential", sequential_segments=2, profile_before_apply=False)
    apply_activation_checkpointing(model, config)
    x = torch.randn(2, 6, requires_grad=True)

    def derivatives(net: nn.Module) -> list[Tensor]:
        out = net(x)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.sum() if order == 1 else first.square().sum()
        return [
            out,
            first,
            *torch.autograd.grad(loss, list(net.parameters()), allow_unused=True, materialize_grads=True),
        ]

    assert_bitwise(derivatives(model), derivatives(bare))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_dropout_after_a_draw_outside(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    outside, inside = nn.Dropout(), nn.Dropout()
    for seed in range(3):
        grads = []
        for form in (inside, replayed(inside)):
            torch.manual_seed(seed)
            x = torch.ones(2000, device=device, requires_grad=True)
            form(outside(x)).sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)


def test_without_the_random_state_it_still_trains() -> None:
    x = torch.randn(2, requires_grad=True)
    checkpoint_region(nn.Dropout(), x, policy=FullPolicy(), preserve_rng_state=False).sum().backward()
    assert x.grad is not None


def mixed(first: Any, second: Any, scale: int, third: Any) -> tuple[Any, ...]:
    a, b = first + second * third, first * second + third
    a *= scale
    b *= scale
    return scale, a, None, True, b, "word", first


def test_results_of_every_kind_and_a_backward_from_each() -> None:
    first, second, third = torch.rand(10, requires_grad=True), torch.rand(10, requires_grad=True), torch.rand(10)
    results = checkpoint_region(mixed, first, second, 3, third, policy=FullPolicy())
    expected = mixed(first, second, 3, third)
    assert [value for value in results if not isinstance(value, Tensor)] == [3, None, True, "word"]
    assert_bitwise([results[i] for i in (1, 4)], [expected[i] for i in (1, 4)])
    assert torch.equal(results[6], first)
    for position in (1, 4):
        wanted = torch.autograd.grad(expected[position].sum(), (first, second), retain_graph=True)
        got = torch.autograd.grad(results[position].sum(), (first, second), retain_graph=True)
        assert_bitwise(list(got), list(wanted))
    results[4].sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        results[4].sum().backward()


def test_no_tensors_at_all_and_none_among_them() -> None:
    assert checkpoint_region(mixed, 0.5, 0.25, 3, 2.0, policy=FullPolicy()) == mixed(0.5, 0.25, 3, 2.0)
    x = torch.randn(3, requires_grad=True)
    checkpoint_region(lambda a, b: a if b is None else a + b, x, None, policy=FullPolicy()).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


@each_policy
def test_outputs_of_which_some_or_none_need_a_gradient(policy: Any) -> None:
    needs, needs_none = torch.randn(4, requires_grad=True), torch.randn(4)
    out = checkpoint_region(lambda a, b: (a * 1, b * 1), needs, needs_none, policy=policy)
    assert [t.requires_grad for t in out] == [True, False]
    out[0].sum().backward()
    alone = checkpoint_region(lambda a, b: a * 1, needs_none, needs, policy=policy)
    assert not alone.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        alone.sum().backward()


@pytest.mark.parametrize("retain", [False, True])
def test_what_replay_made_is_freed_while_backward_goes_on(retain: bool) -> None:
    held: list[int] = []
    x = torch.zeros(1000, requires_grad=True)

    def fn(t: Tensor) -> Tensor:
        for _ in range(3):
            t = t**2
            t.register_hook(lambda grad: held.append(live.live - grad.untyped_storage().nbytes()))
        return (t**2).sum()

    with LiveBytes() as live:
        checkpoint_region(fn, x, policy=FullPolicy()).backward(retain_graph=retain)
    assert len(held) == 3 and held[0] > held[1] > held[2]


def test_the_device_context_around_forward_is_that_of_replay() -> None:
    devices: list[str] = []

    def fn(t: Tensor) -> Tensor:
        devices.append(torch.empty(4).device.type)
        return t.sin() * len(devices[:1])

    x = torch.randn(4, requires_grad=True)
    with torch.device("meta"):
        y = checkpoint_region(fn, x, policy=FullPolicy())
    y.sum().backward()
    assert devices == ["meta", "meta"] and torch.empty(1).device.type == "cpu"


# ------------------------------------------------------------------------------------------------ a checkpointed module
class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight @ torch.randn(8, 8))


class Splits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = (x @ self.first).relu() @ self.second
        return out.sin(), out.cos()


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return ((pair[0] + pair[1]) @ self.weight).relu()


MODULES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a part of a model": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8), nn.ReLU())),
        ["1"],
    ),
    "one that draws": (lambda: nn.Sequential(Draws()), ["0"]),
    "pairs in and out": (lambda: nn.Sequential(Splits(), Joins(), Splits(), Joins()), ["0", "2"]),
    "a pair as the argument": (lambda: nn.Sequential(Splits(), Joins(), Splits(), Joins()), ["1", "3"]),
}


@each_policy
@pytest.mark.parametrize("case", MODULES)
def test_a_module_in_place(case: str, policy: Any) -> None:
    make, names = MODULES[case]
    torch.manual_seed(0)
    bare = make()
    model, keys = copy.deepcopy(bare), list(bare.state_dict())
    apply_specs(model, [CheckpointSpec(members=(name,), policy=policy) for name in names])
    x = torch.randn(4, 8)
    assert_bitwise(gradients(model, model, x), gradients(bare, bare, x))
    assert list(model.state_dict()) == keys
