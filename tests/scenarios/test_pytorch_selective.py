"""Scenarios by role, written anew from the *cases* of PyTorch's selective checkpoints: `TestSelectiveActivationCheckpoint`
in its `test/test_autograd.py`.

Left out: none. Different on purpose, and shown here: an operator without an overload stands for all of its overloads,
where PyTorch refuses it; a kept output that its region changes in place is kept as it was, where PyTorch raises unless
told otherwise (and then gives the changed one); a second backward through a retained graph works, where PyTorch raises; a
policy function is asked in forward only.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from nemo_like import SelectivePolicy
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing import FullPolicy, Policy
from nemo_like.activation_checkpointing.policy import TorchPolicy
from tests.checks import assert_bitwise
from tests.models.blocks import checkpoint_region

KEEP, DROP = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def keeping(*names: str) -> SelectivePolicy:
    return SelectivePolicy(every_nth_matmul=None, save_ops=names)


def asked_for(op: Any) -> TorchPolicy:
    return TorchPolicy(lambda context, func, *args, **kwargs: KEEP if func is op else DROP)


def slopes(fn: Callable[..., Tensor], *inputs: Tensor, policy: Policy | None = None) -> list[Tensor]:
    out = fn(*inputs) if policy is None else checkpoint_region(fn, *inputs, policy=policy)
    return [out, *torch.autograd.grad(out.sum(), inputs)]


MM = torch.ops.aten.mm.default
SPENT: dict[str, tuple[Policy | None, int, int]] = {  # policy, matrices held after forward, matmuls in backward
    "none": (None, 2, 2),
    "full": (FullPolicy(), 0, 3),
    "a list": (keeping("aten.mm.default"), 1, 2),
    "a function": (asked_for(MM), 1, 2),
    "a function of bools": (TorchPolicy(lambda context, func, *args, **kwargs: func is MM), 1, 2),
}


@pytest.mark.parametrize("case", SPENT)
def test_bytes_held_and_flops_of_backward(case: str) -> None:
    policy, matrices, matmuls = SPENT[case]
    x, y = (torch.randn(128, 128, requires_grad=True) for _ in range(2))

    def fn(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a.cos(), b).sin().sum()

    with LiveBytes() as live:
        out = fn(x, y) if policy is None else checkpoint_region(fn, x, y, policy=policy)
        held = live.live - out.untyped_storage().nbytes()
    assert held == matrices * 128 * 128 * 4
    with FlopCounterMode(display=False) as counter:
        out.backward()
    assert counter.get_total_flops() == matmuls * 2 * 128**3


@pytest.mark.parametrize("policy", [asked_for(torch.ops.aten.view.default), keeping("aten.sin.default")])
def test_an_integer_view_among_the_results(policy: Policy) -> None:
    numbers, y = torch.tensor([[1, 2, 3]]), torch.randn(3, requires_grad=True)
    view, out = checkpoint_region(lambda n, t: (n.view(-1), t.sin().cos()), numbers, y, policy=policy)
    assert view.tolist() == [1, 2, 3]
    assert torch.equal(torch.autograd.grad(out.sum(), y)[0], torch.autograd.grad(y.sin().cos().sum(), y)[0])
    with pytest.raises(ValueError, match=r"can't keep aten.view.default"):
        keeping("aten.view.default")


class Sized(torch.Tensor):
    """A subclass that is asked for its sizes through dispatch."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Sized:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), inner.stride(), dtype=inner.dtype, dispatch_sizes_strides_policy="sizes",
            requires_grad=inner.requires_grad,
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*tree_map_only(cls, lambda t: t.inner, args), **(kwargs or {}))
        return tree_map_only(torch.Tensor, cls, out)


@pytest.mark.parametrize("policy", [FullPolicy(), asked_for(torch.ops.aten.sym_size.default)], ids=["full", "sizes"])
def test_a_subclass_whose_sizes_are_dispatched(policy: Policy) -> None:
    def fn(t: Tensor) -> Tensor:
        return (t * t.sum()).view(-1).view(4, 3).exp()

    values = torch.randn(4, 3)
    got = slopes(fn, Sized(values.clone().requires_grad_()), policy=policy)
    wanted = slopes(fn, values.clone().requires_grad_())
    assert_bitwise([t.inner for t in got], wanted)  # type: ignore[attr-defined]


def test_what_is_no_operator_is_refused_and_a_packet_stands_for_all_its_overloads() -> None:
    with pytest.raises(TypeError, match="2"):
        SelectivePolicy(save_ops=[2])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="TorchPolicy needs a function"):
        TorchPolicy(2)  # type: ignore[arg-type]
    packet = SelectivePolicy(save_ops=[torch.ops.aten.sin])  # type: ignore[list-item]
    assert torch.ops.aten.sin.default in packet.tracked_ops()


def test_a_policy_that_counts_is_asked_once_for_each_operator_and_not_in_replay() -> None:
    class Counts:
        def __init__(self) -> None:
            self.asked: list[bool] = []

        def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            self.asked.append(context.is_recompute)
            return KEEP if len(self.asked) == 1 else DROP

    x, counts = torch.randn(3, requires_grad=True), Counts()
    got = slopes(lambda t: t.sin().sin().sin(), x, policy=TorchPolicy(counts))
    assert_bitwise(got, slopes(lambda t: t.sin().sin().sin(), x))
    assert counts.asked == [False] * 3


@pytest.mark.parametrize("ended", ["dropped", "backward", "retained"])
def test_how_long_what_is_kept_lives(ended: str) -> None:
    x = torch.randn(1000, requires_grad=True)
    gc.disable()
    try:
        with LiveBytes() as live:
            out = checkpoint_region(
                lambda t: t.cos().exp().sin(), x, policy=keeping("aten.cos.default", "aten.exp.default")
            )
            mark, kept = weakref.ref(out), live.live - out.untyped_storage().nbytes()
            assert kept == 2 * 4000
            if ended != "dropped":
                out.sum().backward(retain_graph=ended == "retained")
                x.grad = None
                # A retained graph may be walked again, and what was kept is what that needs.
                assert live.live - 4000 == (kept if ended == "retained" else 0)
            del out
            assert live.live == 0 and mark() is None
    finally:
        gc.enable()


def test_a_kept_output_that_its_region_changes_in_place() -> None:
    def fn(t: Tensor) -> Tensor:
        return t.sin().mul_(2).cos().exp()

    x = torch.randn(3, requires_grad=True)
    wanted = slopes(fn, x)
    for policy in (keeping("aten.sin.default"), asked_for(torch.ops.aten.sin.default)):
        assert_bitwise(slopes(fn, x, policy=policy), wanted)


def test_an_operator_of_two_results_is_kept_as_one() -> None:
    def fn(t: Tensor) -> Tensor:
        variance, mean = torch.var_mean(t)
        return variance * mean

    asked = []

    def policy_fn(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(op)
        return KEEP if op is torch.ops.aten.var_mean.correction else DROP

    x = torch.randn(3, requires_grad=True)
    assert_bitwise(slopes(fn, x, policy=TorchPolicy(policy_fn)), slopes(fn, x))
    assert asked.count(torch.ops.aten.var_mean.correction) == 1


RUNS: list[int] = []


@torch.library.custom_op("nemo_like_scenarios::sine_and_number", mutates_args=())
def sine_and_number(x: Tensor) -> tuple[Tensor, int]:
    RUNS.append(1)
    return x.sin(), 2


def _keep_input(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _derivative(ctx: Any, grad: Tensor, _: None) -> Tensor:
    return grad * ctx.saved_tensors[0].cos()


sine_and_number.register_autograd(_derivative, setup_context=_keep_input)


def test_an_operator_whose_results_are_not_all_tensors_runs_once() -> None:
    def fn(t: Tensor) -> Tensor:
        return (sine_and_number(t)[0] * t.sin().exp()).sin()

    x = torch.randn(3, requires_grad=True)
    wanted = slopes(fn, x)
    RUNS.clear()
    assert_bitwise(slopes(fn, x, policy=keeping("nemo_like_scenarios.sine_and_number.default")), wanted)
    assert len(RUNS) == 1


def test_a_retained_graph_is_replayed_as_often_as_it_is_walked() -> None:
    def fn(t: Tensor) -> Tensor:
        return t.sin().cos().exp()

    x = torch.randn(3, requires_grad=True)
    (wanted,) = torch.autograd.grad(fn(x).sum(), x)
    loss = checkpoint_region(fn, x, policy=asked_for(torch.ops.aten.sin.default)).sum()
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], wanted)
