"""Random programs, and wrapper subclasses that are taken apart and put together again."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_map

from nemo_like.offload import offload_activations
from nemo_like.offload.backends import Backend
from tests.checks import same
from tests.offload.cases import config

SIDE = 6  # every tensor of a program is SIDE x SIDE, so that any operator fits any tensor


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x * x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, square = ctx.saved_tensors
        return grad * (square * 2 + x * x)


UNARY = {
    "sin": torch.sin,
    "exp": lambda t: (t * 0.1).exp(),
    "tanh": torch.tanh,
    "softmax": lambda t: t.softmax(0),
    "cube": lambda t: _Cube.apply(t * 0.5),
    "transpose": lambda t: t.t(),
    "row": lambda t: t[2].expand(SIDE, SIDE),
    "offset rows": lambda t: t[1:].repeat(2, 1)[2 : SIDE + 2],
    "flip": lambda t: t.flip(0),
    "unfold": lambda t: t.reshape(-1)[: SIDE + SIDE - 1].unfold(0, SIDE, 1),
    "window": lambda t: t.contiguous().as_strided((SIDE, SIDE), (2, 1), 3),
    "complex": lambda t: (torch.view_as_complex(t.reshape(SIDE, -1, 2)).conj() * 1j).abs().repeat(1, 2),
    "detach": lambda t: t.detach(),
    "copy": lambda t: t.clone(),
    "dead branch": lambda t: (t.sin().cos(), t)[1],
}
BINARY = {"mul": torch.mul, "matmul": lambda a, b: (a @ b) / SIDE, "where": lambda a, b: torch.where(a > b, a, b * 0.5)}
CHANGES = {
    "add_": lambda t: t.add_(0.5),
    "mul_": lambda t: t.mul_(0.9),
    "sin_": lambda t: t.sin_(),
    "row fill": lambda t: t[1].fill_(0.3),
    "column add": lambda t: t.t()[2].add_(1),
    "hidden change": lambda t: t.detach().add_(0.25),
}
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 9)),
        st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 9)),
        st.tuples(st.just("drop"), st.integers(0, 9)),
    ),
    min_size=2,
    max_size=12,
)


def _run(steps: list[tuple[Any, ...]], leaves: list[torch.Tensor]) -> torch.Tensor:
    alive = [leaf * 1 for leaf in leaves]
    for name, *which in steps:
        chosen = [alive[index % len(alive)] for index in which]
        if name == "drop":
            if len(alive) > 1:
                alive.pop(which[0] % len(alive))
        elif name in CHANGES:
            CHANGES[name](chosen[0])
        else:
            alive.append(UNARY[name](*chosen) if name in UNARY else BINARY[name](*chosen))
    return torch.stack([tensor.sum() for tensor in alive]).sum()


def _outcome(loss_of: Any, leaves: list[torch.Tensor], passes: int) -> Any:
    """The gradients, or the kind of refusal; and where: forward or backward."""
    try:
        loss = loss_of()
    except RuntimeError as error:
        return "forward", str(error).split(".")[0]
    if not loss.requires_grad:
        return "no graph"
    try:
        return [
            torch.autograd.grad(loss, leaves, retain_graph=index + 1 < passes, allow_unused=True)
            for index in range(passes)
        ]
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
        return "backward"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=STEPS,
    seed=st.integers(0, 3),
    inflight=st.sampled_from([1, 300, 1 << 30]),
    prefetch=st.integers(0, 2),
    min_bytes=st.sampled_from([0, 0, 200]),
    passes=st.integers(1, 2),
)
def test_random_programs(steps: Any, seed: int, inflight: int, prefetch: int, min_bytes: int, passes: int) -> None:
    torch.manual_seed(seed)
    leaves = [torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(2)]
    expected = _outcome(lambda: _run(steps, leaves), leaves, passes)
    limits = config(max_inflight_bytes=inflight, prefetch=prefetch, min_bytes=min_bytes)
    offloader = offload_activations(limits, backend=Backend())

    def offloaded() -> torch.Tensor:
        with offloader:
            return _run(steps, leaves)

    actual = _outcome(offloaded, leaves, passes)
    assert same(actual, expected), (actual, expected)
    # After a refusal, autograd's queue holds what it had still to do until the next backward of this thread.
    torch.ones(1, requires_grad=True).sum().backward()
    assert offloader.collect().host_live_bytes == 0


class Blockwise(torch.Tensor):
    """A stand-in for torchao's and NF4's kind: int8 values with a float scale per row."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, note: str) -> Blockwise:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, note: str) -> None:
        self.values, self.scale, self.note = values, scale, note

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["values", "scale"], self.note

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], note: str, size: Any, stride: Any) -> Blockwise:
        return Blockwise(inner["values"], inner["scale"], note)

    def plain(self) -> torch.Tensor:
        return self.values.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Blockwise(args[0].values, args[0].scale, args[0].note)
        unwrap = lambda t: t.plain() if isinstance(t, Blockwise) else t  # noqa: E731
        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


class Opaque(torch.Tensor):
    """A subclass that says nothing about itself."""


def _quantised(seed: int = 0) -> Blockwise:
    torch.manual_seed(seed)
    return Blockwise(torch.randint(-8, 8, (32, 16), dtype=torch.int8), torch.rand(32, 1), "blocks of a row")


def test_both_parts_of_a_quantised_tensor_move_and_come_back() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    expected = torch.autograd.grad((x @ _quantised().plain()).sum(), x)[0]
    with offload_activations(config(), backend=Backend()) as offloader:
        loss = (x @ _quantised()).sum()
    assert offloader.stats.moved_bytes == 32 * 16 + 32 * 4
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_what_comes_back_is_of_the_same_kind() -> None:
    offloader = offload_activations(config(), backend=Backend())
    tensor = _quantised()
    values, scale = tensor.values.clone(), tensor.scale.clone()
    handle = offloader.pack(tensor)
    del tensor
    for _ in range(2):
        back = handle.get()
        assert type(back) is Blockwise and back.note == "blocks of a row"
        assert torch.equal(back.values, values) and torch.equal(back.scale, scale)
    assert offloader.stats.reloads == 4  # each part, each time: nothing held on to what had been read


def test_small_parts_stay_and_large_ones_go() -> None:
    offloader = offload_activations(config(min_bytes=512), backend=Backend())
    tensor = _quantised()
    expected = tensor.plain()
    handle = offloader.pack(tensor)
    del tensor
    assert (offloader.stats.moved_bytes, offloader.stats.kept_bytes["smaller than min_bytes"]) == (512, 128)
    assert torch.equal(handle.get().plain(), expected)  # type: ignore[attr-defined]


def test_shared_parts_move_once() -> None:
    offloader = offload_activations(config(), backend=Backend())
    one = _quantised()
    two = Blockwise(one.values, one.scale * 2, "another")
    handles = [offloader.pack(one), offloader.pack(two)]
    assert offloader.stats.copies == 3
    expected = one.plain(), two.plain()
    del one, two
    assert all(torch.equal(h.get().plain(), e) for h, e in zip(handles, expected, strict=True))  # type: ignore[attr-defined]


def test_a_subclass_that_cannot_be_taken_apart_stays() -> None:
    tensor = torch.randn(8).as_subclass(Opaque)
    offloader = offload_activations(config(), backend=Backend())
    assert offloader.pack(tensor).get() is tensor
    (reason,) = offloader.stats.kept_count
    assert reason == "unsupported: an Opaque, which does not define how to take it apart (__tensor_flatten__)"
