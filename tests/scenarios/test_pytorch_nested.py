"""Scenarios by role, written anew from the *cases* of PyTorch's nested checkpoints: `TestNestedCheckpoint` in its
`test/test_autograd.py`. Values are compared bit for bit, where the original allows a tolerance.

Left out: none. Different on purpose: the argument `early_stop` beats `set_early_stop` around the call, where PyTorch has
it the other way round.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_like.activation_checkpointing import FullPolicy
from nemo_like.activation_checkpointing.engine import run_region, set_early_stop
from tests.checks import assert_bitwise
from tests.models.blocks import checkpoint_region, region

each_stop = pytest.mark.parametrize("early_stop", [True, False])


def replayed(fn: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return region(fn, FullPolicy())


def slope(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The derivative of ``fn(x).sum()`` as a function that can itself be differentiated."""

    def derivative(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(fn(x).sum(), x, create_graph=True)[0]

    return derivative


def wave(x: Tensor) -> Tensor:
    return x.sin().exp().sin()


def wave_with_backwards_inside(x: Tensor) -> Tensor:
    first, second = wave(x), wave(x)
    torch.autograd.grad(first.sum(), x)
    torch.autograd.grad(second.sum(), x)
    return x.sin()


c, d = replayed, slope
NESTINGS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "c": (lambda f: f, lambda f: c(f)),
    "c c": (lambda f: f, lambda f: c(c(f))),
    "d c": (d, lambda f: d(c(f))),
    "d c c": (d, lambda f: d(c(c(f)))),
    "d c d": (lambda f: d(d(f)), lambda f: d(c(d(f)))),
    "c d d c": (lambda f: d(d(f)), lambda f: c(d(d(c(f))))),
    "d c d c": (lambda f: d(d(f)), lambda f: d(c(d(c(f))))),
    "d c d d c": (lambda f: d(d(d(f))), lambda f: d(c(d(d(c(f)))))),
    "d c d c d c": (lambda f: d(d(d(f))), lambda f: d(c(d(c(d(c(f))))))),
}


def nodes_alive_after(fn: Callable[[Tensor], Tensor]) -> int:
    """How many nodes of the graph of ``fn(x)`` outlive its last reference, without a garbage collection."""

    class Mark:
        pass

    def run() -> list[weakref.ref[Mark]]:
        stack, marks, seen = [fn(torch.randn((), requires_grad=True)).grad_fn], [], set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            mark = node.metadata["mark"] = Mark()
            marks.append(weakref.ref(mark))
            stack += [following for following, _ in node.next_functions]
        assert marks
        return marks

    gc.disable()
    try:
        return sum(mark() is not None for mark in run())
    finally:
        gc.enable()


@each_stop
@pytest.mark.parametrize("fn", [wave, wave_with_backwards_inside])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_regions_and_derivatives_nest(nesting: str, fn: Callable[[Tensor], Tensor], early_stop: bool) -> None:
    bare, checkpointed = NESTINGS[nesting]
    x = torch.tensor(0.7, requires_grad=True)
    with set_early_stop(early_stop):
        assert torch.equal(checkpointed(fn)(x), bare(fn)(x))
        assert nodes_alive_after(checkpointed(fn)) == 0


@each_stop
def test_two_regions_inside_one(early_stop: bool) -> None:
    def other(x: Tensor) -> Tensor:
        return x.cos().sin().exp()

    def both(x: Tensor) -> Tensor:
        return replayed(other)(replayed(wave)(x))

    x = torch.randn(3, 3, requires_grad=True)
    expected = slope(slope(lambda t: other(wave(t))))(x)
    with set_early_stop(early_stop):
        for form in (slope(slope(replayed(both))), slope(replayed(slope(replayed(both))))):
            assert torch.equal(form(x), expected)
        for form in (slope(replayed(both)), slope(slope(replayed(both))), slope(replayed(slope(replayed(both))))):
            assert nodes_alive_after(form) == 0


@each_stop
def test_arguments_and_results_that_are_no_tensors_and_keywords(early_stop: bool) -> None:
    def fn(number: int, a: Tensor, b: Tensor, then: Callable[[Tensor], Tensor], factor: Tensor | None = None) -> Any:
        out = then(number * a * b.exp())
        return out if factor is None else out * factor, 1, "word"

    a, b, factor = (torch.tensor(value, requires_grad=True) for value in (2.0, 3.0, 0.5))
    with set_early_stop(early_stop):
        out, *others = checkpoint_region(fn, 3, a, b, torch.sin, policy=FullPolicy(), factor=factor)
    assert others == [1, "word"]
    expected = fn(3, a, b, torch.sin, factor)[0]
    assert_bitwise(list(torch.autograd.grad(out, (a, b, factor))), list(torch.autograd.grad(expected, (a, b, factor))))


@each_stop
def test_a_hook_on_the_graph_of_forward_runs_once(early_stop: bool) -> None:
    a, calls = torch.tensor(1.0, requires_grad=True), []
    out = run_region(lambda t: t.sin().cos().sin(), (a,), {}, policy=FullPolicy(), early_stop=early_stop)
    out.grad_fn.next_functions[0][0].register_hook(lambda *_: calls.append(1))
    out.backward()
    assert calls == [1]


@each_stop
def test_a_backward_from_a_hook_of_the_same_region(early_stop: bool) -> None:
    def fn(t: Tensor) -> tuple[Tensor, Tensor]:
        middle = t.sin().cos()
        return middle, middle.sin()

    def total(form: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        a = torch.tensor(1.0, requires_grad=True)
        middle, out = form(a)
        out.grad_fn.register_hook(lambda *_: middle.backward(retain_graph=True))
        out.backward(retain_graph=True)
        return a.grad

    got = total(lambda t: run_region(fn, (t,), {}, policy=FullPolicy(), early_stop=early_stop))
    assert torch.equal(got, total(fn))


@pytest.mark.parametrize(
    ("around", "argument", "runs"),
    [
        ((), None, 1),
        ((), False, 2),
        ((), True, 1),
        ((False,), None, 2),
        ((True,), None, 1),
        ((False, True), None, 1),
        ((False,), True, 1),
        ((True,), False, 2),
    ],
)
def test_where_early_stop_is_asked_for(around: tuple[bool, ...], argument: bool | None, runs: int) -> None:
    # The clone saves nothing, so replay reaches it only where it runs to the end.
    clones = []

    def fn(t: Tensor) -> Tensor:
        out = t.sin().cos()
        clones.append(1)
        return out.clone()

    managers = [set_early_stop(value) for value in around]
    for manager in managers:
        manager.__enter__()
    out = run_region(fn, (torch.tensor(1.0, requires_grad=True),), {}, policy=FullPolicy(), early_stop=argument)
    for manager in reversed(managers):
        manager.__exit__(None, None, None)
    out.backward()
    assert len(clones) == runs


@pytest.mark.parametrize(("early_stop", "sines"), [(True, 1), (False, 2)])
def test_replay_where_only_the_input_or_nothing_was_saved(early_stop: bool, sines: int) -> None:
    class CountSines(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten.sin.default
            return func(*args, **(kwargs or {}))

    calls: list[str] = []

    def saves_its_input(t: Tensor) -> Tensor:
        calls.append("input")
        return t.sin()

    def saves_nothing(t: Tensor) -> Tensor:
        calls.append("nothing")
        return t.clone()

    options: dict[str, Any] = {"policy": FullPolicy(), "early_stop": early_stop}
    with CountSines() as counted:
        run_region(saves_its_input, (torch.tensor(1.0, requires_grad=True),), {}, **options).backward()
    assert calls == ["input"] * 2 and counted.count == sines
    run_region(saves_nothing, (torch.tensor(1.0, requires_grad=True),), {}, **options).backward()
    assert calls.count("nothing") == 1  # backward asks for nothing, so nothing is replayed, to the end or not
