"""Everything but one forward and one backward: retained graphs, second derivatives, nesting, errors."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing.engine import run_region, set_early_stop
from nemo_like.activation_checkpointing.policy import HOST, DecisionTable, FullPolicy, SelectivePolicy
from tests.checks import assert_bitwise
from tests.models.blocks import (
    LlamaBlock,
    Operators,
    RouterBlock,
    checkpoint_region,
    gradients,
    region,
    under,
    without_collector,
)

POLICIES = {
    "full": FullPolicy(),
    "selective": SelectivePolicy(),
    "kept": SelectivePolicy(every_nth_matmul=None),
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


def mlp():
    return under(
        "none",
        lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Sigmoid()),
    )


def assert_retained(block, x, policy):
    """The same gradient from each backward of one graph, until it is freed."""
    (wanted,) = torch.autograd.grad((block(x) ** 2).sum(), x)
    loss = (checkpoint_region(block, x, policy=policy) ** 2).sum()
    for retain in (True, True, False):
        (got,) = torch.autograd.grad(loss, x, retain_graph=retain)
        assert torch.equal(got, wanted)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)


@each_policy
def test_retained_graph_gives_the_same_gradient_each_time(policy):
    assert_retained(LlamaBlock(32), torch.randn(1, 8, 32, requires_grad=True), policy)


def test_retained_graph_with_host_and_in_place_outputs():
    for policy in (SelectivePolicy(every_nth_matmul=None), DecisionTable({"aten.topk.default": [HOST]})):
        assert_retained(RouterBlock(), torch.randn(2, 3, 16, requires_grad=True), policy)


@each_policy
def test_double_backward(policy):
    block, x = mlp(), torch.randn(3, 8, requires_grad=True)

    def second(run):
        (first,) = torch.autograd.grad((run(x) ** 2).sum(), x, create_graph=True)
        return [first.detach(), *torch.autograd.grad((first**3).sum(), [x, *block.parameters()])]

    assert_bitwise(second(region(block, policy)), second(block))


@each_policy
def test_two_forwards_before_one_backward(policy):
    block = LlamaBlock(32)
    a, b = torch.randn(1, 8, 32), torch.randn(2, 4, 32)
    run = region(block, policy)

    def both(call):
        return lambda s, t: torch.cat([call(s).flatten(), call(t).flatten()])

    assert_bitwise(gradients(both(run), block, a, b), gradients(both(block), block, a, b))


@each_policy
def test_backwards_in_another_order_than_forwards(policy):
    block, run = mlp(), region(mlp(), policy)
    x = [torch.randn(3, 8, requires_grad=True) for _ in range(3)]
    losses = [(run(t) ** 2).sum() for t in x]
    for index in (1, 0, 2):
        (got,) = torch.autograd.grad(losses[index], x[index])
        assert torch.equal(got, torch.autograd.grad((block(x[index]) ** 2).sum(), x[index])[0])


@pytest.mark.parametrize("outer", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("inner", POLICIES.values(), ids=POLICIES.keys())
def test_nested_regions(outer, inner):
    torch.manual_seed(0)
    block = nn.Sequential(LlamaBlock(32), nn.Dropout(0.2), LlamaBlock(32))

    def nested(x):
        x = checkpoint_region(block[0], x, policy=inner, name="inner 0")
        return checkpoint_region(block[2], block[1](x).tanh(), policy=inner, name="inner 1")

    plain = lambda x: block[2](block[1](block[0](x)).tanh())  # noqa: E731
    x = torch.randn(1, 8, 32)
    assert_bitwise(gradients(region(nested, outer), block, x), gradients(plain, block, x))


def test_a_region_inside_pytorchs_checkpoint_and_around_it():
    from torch.utils.checkpoint import checkpoint

    block, x = LlamaBlock(32), torch.randn(1, 8, 32)
    wanted = gradients(block, block, x)
    inside = lambda t: checkpoint(region(block, SelectivePolicy()), t, use_reentrant=False)  # noqa: E731
    around = region(lambda t: checkpoint(block, t, use_reentrant=False), SelectivePolicy())
    assert_bitwise(gradients(inside, block, x), wanted)
    assert_bitwise(gradients(around, block, x), wanted)


@each_policy
def test_an_output_that_nobody_uses_costs_no_replay_of_its_own(policy):
    a, b, calls = mlp(), mlp(), []

    def both(t):
        first = a(t)
        calls.append(1)
        return first, b(t)

    x = torch.randn(3, 8, requires_grad=True)
    first, second = checkpoint_region(both, x, policy=policy)
    del second  # its graph goes, and with it the need to replay past `a`
    first.sum().backward()
    assert calls == [1]


@each_policy
def test_without_gradients_the_function_simply_runs(policy):
    block, x = mlp(), torch.randn(3, 8)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks
    seen = []
    with torch.no_grad():
        out = checkpoint_region(lambda t: seen.append(hooks(False)) or block(t), x, policy=policy)
    assert torch.equal(out, block(x)) and seen == [None]


@each_policy
def test_a_region_of_which_nothing_needs_a_gradient_holds_nothing(policy):
    block = mlp().requires_grad_(False)
    x = torch.randn(3, 8)
    with LiveBytes() as live:
        out = checkpoint_region(block, x, policy=policy)
        assert live.live == out.untyped_storage().nbytes()


def test_torch_func_is_refused():
    block = mlp()
    with pytest.raises(RuntimeError, match=r"'layers\.0' runs inside a torch\.func transform"):
        torch.func.grad(lambda t: checkpoint_region(block, t, policy=FullPolicy(), name="layers.0").sum())(
            torch.ones(8)
        )


def stack_depths():
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


@pytest.mark.few(3)
@each_policy
@pytest.mark.parametrize("when", ["forward", "replay"])
def test_an_exception_leaves_no_mode_and_no_memory(policy, when):
    block, calls = LlamaBlock(32), []

    def fn(x):
        calls.append(1)
        h = block(x)
        if len(calls) == (1 if when == "forward" else 2):
            raise LookupError("from the user's code")
        return h.tanh()

    x = torch.randn(1, 8, 32, requires_grad=True)
    before = stack_depths()
    gc.collect()
    with LiveBytes() as live:
        inside = stack_depths()
        with pytest.raises(LookupError, match="from the user's code") as caught:
            checkpoint_region(fn, x, policy=policy, name="layers.5").sum().backward()
        assert stack_depths() == inside
        if when == "replay":
            assert any("layers.5" in note for note in caught.value.__notes__)
        del caught
        assert live.live == 0
    assert stack_depths() == before
    assert_bitwise(gradients(region(block, policy), block, x), gradients(block, block, x))  # and all goes on


def test_code_that_swallows_exceptions_does_not_break_the_early_stop():
    block = mlp()

    def fn(x):
        try:
            return block(x)
        except Exception:  # noqa: BLE001 (what this test is about)
            return block(x * 0)

    x = torch.randn(3, 8)
    assert_bitwise(gradients(region(fn, FullPolicy()), block, x), gradients(block, block, x))


class Token:
    """Something that a weak reference can see."""


def test_a_region_dies_with_its_graph_without_garbage_collection():
    token = Token()
    alive = weakref.ref(token)
    x = torch.randn(3, 8, requires_grad=True)
    with without_collector():
        y = checkpoint_region(lambda t, token=token: t.exp().softmax(-1).sigmoid(), x, policy=FullPolicy())
        del token
        assert alive() is not None
        y.sum().backward()
        del y
        assert alive() is None


@each_policy
def test_dispatch_modes_of_others_may_be_on_in_one_phase_only(policy):
    block, x = LlamaBlock(32), torch.randn(1, 8, 32, requires_grad=True)
    (wanted,) = torch.autograd.grad(block(x).sum(), x)
    with Operators() as mode:
        y = checkpoint_region(block, x, policy=policy).sum()
    assert torch.ops.aten.mm.default in mode.ops
    assert torch.equal(torch.autograd.grad(y, x)[0], wanted)
    y = checkpoint_region(block, x, policy=policy).sum()
    with Operators():
        assert torch.equal(torch.autograd.grad(y, x)[0], wanted)


# --- Nested regions and derivatives, and where replay stops: cases of PyTorch's `TestNestedCheckpoint` --------------------

each_stop = pytest.mark.parametrize("early_stop", [True, False])


def slope(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The derivative of ``fn(x).sum()`` as a function that can itself be differentiated."""

    def derivative(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(fn(x).sum(), x, create_graph=True)[0]

    return derivative


def wave(x: Tensor) -> Tensor:
    return x.sin().exp().sin()


def wave_with_a_backward_inside(x: Tensor) -> Tensor:
    torch.autograd.grad(wave(x).sum(), x)
    return x.sin()


def c(fn: Callable[..., Any]) -> Callable[..., Any]:
    return region(fn, FullPolicy())


d = slope
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

    def run() -> list[weakref.ref[Token]]:
        stack, marks, seen = [fn(torch.randn((), requires_grad=True)).grad_fn], [], set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            mark = node.metadata["mark"] = Token()
            marks.append(weakref.ref(mark))
            stack += [following for following, _ in node.next_functions]
        assert marks
        return marks

    with without_collector():
        return sum(mark() is not None for mark in run())


@each_stop
@pytest.mark.parametrize(
    "fn", [wave, wave_with_a_backward_inside, lambda x: c(lambda t: t.cos().sin().exp())(c(wave)(x))]
)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_regions_and_derivatives_nest(nesting: str, fn: Callable[[Tensor], Tensor], early_stop: bool) -> None:
    bare, checkpointed = NESTINGS[nesting]
    x = torch.tensor(0.7, requires_grad=True)
    with set_early_stop(early_stop):
        assert torch.equal(checkpointed(fn)(x), bare(fn)(x))
        assert nodes_alive_after(checkpointed(fn)) == 0


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

    with contextlib.ExitStack() as stack:
        for value in around:
            stack.enter_context(set_early_stop(value))
        out = run_region(fn, (torch.tensor(1.0, requires_grad=True),), {}, policy=FullPolicy(), early_stop=argument)
    out.backward()
    assert len(clones) == runs


@each_stop
def test_replay_where_only_the_input_or_nothing_was_saved(early_stop: bool) -> None:
    calls: list[str] = []

    def saves_its_input(t: Tensor) -> Tensor:
        calls.append("input")
        return t.sin()

    def saves_nothing(t: Tensor) -> Tensor:
        calls.append("nothing")
        return t.clone()

    with Operators() as mode:
        for fn in (saves_its_input, saves_nothing):
            x = torch.tensor(1.0, requires_grad=True)
            run_region(fn, (x,), {}, policy=FullPolicy(), early_stop=early_stop).backward()
    assert mode.ops.count(torch.ops.aten.sin.default) == (1 if early_stop else 2)
    # Backward asks for nothing of the clone, so nothing is replayed, to the end or not.
    assert calls == ["input", "input", "nothing"]
