"""A summary is the same for the same values, however they lie in memory, and another one for other values."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from nemo_like._util import tensor_summary as module
from nemo_like._util.tensor_summary import summary

PIECE = 1024 * 2048
SHAPES = [
    (),
    (1,),
    (7,),
    (1023,),
    (1024,),
    (1025,),
    (3, 5, 7),
    (PIECE,),
    (PIECE + 1,),
    (3, PIECE),
    (2, 3, PIECE // 2 + 3),
]


def numbers(tensor: Tensor) -> Tensor:
    found = summary(tensor)
    assert found is not None and found.shape == (3,)
    return found


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_are_what_they_say(shape: tuple[int, ...]) -> None:
    x = values(*shape)
    found = numbers(x)
    signed, square, odd = found.tolist()
    assert found.dtype == torch.float64
    assert math.isclose(square, x.double().square().sum().item(), rel_tol=1e-12)
    assert odd == 0
    # By the signs of single elements, which is how a signed sum is defined.
    for at in {0, x.numel() // 2, x.numel() - 1}:
        single = torch.zeros(x.numel())
        single[at] = 1
        one = numbers(single.view(shape))[0]
        assert one.abs() == 1
        changed = x.clone().view(-1)
        changed[at] += 1
        assert_close(numbers(changed.view(shape))[0], found[0] + one, rtol=0, atol=1e-3)
    assert abs(signed) < 6 * math.sqrt(square) + 1e-9


@pytest.mark.parametrize("shape", [(64, 96), (3, 1000, 1100)])
def test_how_the_values_lie_in_memory_does_not_count(shape: tuple[int, ...]) -> None:
    x = values(*shape)
    wanted = numbers(x)
    transposed = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    strided = torch.empty(*shape, 2)[..., 0].copy_(x)
    assert transposed.stride() != x.stride() != strided.stride()
    assert all(torch.equal(numbers(other), wanted) for other in (transposed, strided))
    assert torch.equal(numbers(x[:1].expand(2, *shape[1:])), numbers(torch.cat([x[:1]] * 2)))


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_a_difference_moves_the_signed_sum_by_its_norm(share: float) -> None:
    x = values(1000, 1000)
    torch.manual_seed(0)
    distances = []
    for _ in range(40):
        noise = torch.randn_like(x) * (torch.rand_like(x) < share)
        distances.append(((numbers(x + noise) - numbers(x))[0].abs() / noise.norm()).item())
    root_mean_square = math.sqrt(sum(d * d for d in distances) / len(distances))
    assert 0.7 < root_mean_square < 1.3 and max(distances) < 4


def test_elements_that_change_places_are_seen() -> None:
    x = values(300, 400)
    for other in (x.flip(0), x.flip(1), x.roll(1, 0), x.roll(1, 1)):
        assert (numbers(other) - numbers(x))[0].abs() > 0.01 * x.norm()


def test_what_is_not_finite_counts_by_place_and_kind() -> None:
    x = values(50, 50)
    signed = []
    for value, at in ((math.nan, 3), (math.inf, 3), (-math.inf, 3), (math.nan, 4)):
        odd = x.clone()
        odd.view(-1)[at] = value
        found = numbers(odd)
        assert found.isfinite().all() and found[2] == 1
        signed.append(found[0].item())
    assert len(set(signed)) == 4


def test_neither_torchs_nor_pythons_random_numbers_are_drawn() -> None:
    module._signs.cache_clear()
    before, state = torch.get_rng_state(), random.getstate()
    numbers(values(10))
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == state


def test_without_numbers() -> None:
    class Opaque(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError("nothing is asked of it")

    opaque = Tensor._make_wrapper_subclass(Opaque, (3,))
    assert [summary(x) for x in (opaque, torch.ones(0, 3), torch.ones(3, device="meta"))] == [None] * 3


def test_parts() -> None:
    x = values(6, 6)
    mkldnn, quantized = x.to_mkldnn(), torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    assert torch.equal(numbers(mkldnn), numbers(x))
    assert torch.equal(numbers(quantized), numbers(quantized.int_repr()))
    assert torch.equal(numbers(torch.complex(x, x)), numbers(torch.stack([x, x], -1)))
    for sparse in (x.to_sparse(), x.to_sparse_csr()):
        assert not torch.equal(numbers(sparse), numbers(sparse * 2))
    if hasattr(torch, "float4_e2m1fn_x2"):
        packed = torch.arange(8, dtype=torch.uint8)
        assert torch.equal(numbers(packed.view(torch.float4_e2m1fn_x2)), numbers(packed))
