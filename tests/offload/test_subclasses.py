"""Wrapper subclasses (quantised tensors, nested wrappers) are taken apart, moved and put together again."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from nemo_like.offload import offload_activations
from nemo_like.offload.backends import Backend
from tests.offload.cases import config


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
    assert (offloader.stats.copies, offloader.stats.shared) == (3, 1)
    expected = one.plain(), two.plain()
    del one, two
    assert all(torch.equal(h.get().plain(), e) for h, e in zip(handles, expected, strict=True))  # type: ignore[attr-defined]


def test_a_subclass_that_cannot_be_taken_apart_stays() -> None:
    tensor = torch.randn(8).as_subclass(Opaque)
    offloader = offload_activations(config(), backend=Backend())
    assert offloader.pack(tensor).get() is tensor
    (reason,) = offloader.stats.kept_count
    assert reason == "unsupported: an Opaque, which does not define how to take it apart (__tensor_flatten__)"
