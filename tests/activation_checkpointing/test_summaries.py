"""A summary is the same for the same values, however they lie in memory, and another one for other values."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from nemo_like.activation_checkpointing.engine import verification as module
from nemo_like.activation_checkpointing.engine.verification import summaries

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


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_are_what_they_say(shape: tuple[int, ...]) -> None:
    x = values(*shape)
    (found,) = summaries(x)
    first, second, square, odd, odd_sum = found.tolist()
    assert found.dtype == torch.float64
    assert math.isclose(square, x.double().square().sum().item(), rel_tol=1e-12)
    assert odd == odd_sum == 0
    # By the signs of single elements, which is how a signed sum is defined.
    for at in {0, x.numel() // 2, x.numel() - 1}:
        single = torch.zeros(x.numel())
        single[at] = 1
        ones = summaries(single.view(shape))[0][:2]
        assert ones.abs().tolist() == [1, 1]
        changed = x.clone().view(-1)
        changed[at] += 1
        assert_close(summaries(changed.view(shape))[0][:2], found[:2] + ones, rtol=0, atol=1e-3)
    assert abs(first) < 6 * math.sqrt(square) + 1e-9 and abs(second) < 6 * math.sqrt(square) + 1e-9


@pytest.mark.parametrize("shape", [(64, 96), (3, 1000, 1100)])
def test_how_the_values_lie_in_memory_does_not_count(shape: tuple[int, ...]) -> None:
    x = values(*shape)
    wanted = summaries(x)
    transposed = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    strided = torch.empty(*shape, 2)[..., 0].copy_(x)
    assert transposed.stride() != x.stride() != strided.stride()
    assert all(torch.equal(summaries(other)[0], wanted[0]) for other in (transposed, strided))
    assert torch.equal(summaries(x[:1].expand(2, *shape[1:]))[0], summaries(torch.cat([x[:1]] * 2))[0])


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_a_difference_moves_a_signed_sum_by_its_norm(share: float) -> None:
    x = values(1000, 1000)
    torch.manual_seed(0)
    distances = []
    for _ in range(20):
        noise = torch.randn_like(x) * (torch.rand_like(x) < share)
        moved = summaries(x + noise)[0][:2] - summaries(x)[0][:2]
        distances += (moved.abs() / noise.norm()).tolist()
    root_mean_square = math.sqrt(sum(d * d for d in distances) / len(distances))
    assert 0.7 < root_mean_square < 1.3 and max(distances) < 4


def test_elements_that_change_places_are_seen() -> None:
    x = values(300, 400)
    for other in (x.flip(0), x.flip(1), x.roll(1, 0), x.roll(1, 1)):
        assert (summaries(other)[0] - summaries(x)[0])[:2].abs().max() > 0.1 * x.norm()


def test_what_is_not_finite_counts_by_place_and_kind() -> None:
    x = values(50, 50)
    found = []
    for value, at in ((math.nan, 3), (math.inf, 3), (-math.inf, 3), (math.nan, 4), (0.0, 3)):
        odd = x.clone()
        odd.view(-1)[at] = value
        found.append(summaries(odd)[0].tolist())
        assert summaries(odd)[0].isfinite().all()
        assert found[-1] == summaries(odd.clone())[0].tolist()
    assert [numbers[3] for numbers in found] == [1, 1, 1, 1, 0]
    assert len({numbers[4] for numbers in found[:3]}) == 3
    assert found[0][:3] == found[1][:3] == found[4][:3]  # it stands for zero beside the finite ones


def test_neither_torchs_nor_pythons_random_numbers_are_drawn() -> None:
    module._signs.cache_clear()
    before, state = torch.get_rng_state(), random.getstate()
    summaries(values(10))
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == state


def test_without_numbers() -> None:
    class Opaque(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError("nothing is asked of it")

    opaque = Tensor._make_wrapper_subclass(Opaque, (3,))
    assert [summaries(x) for x in (opaque, torch.ones(0, 3), torch.ones(3, device="meta"))] == [[], [], []]


def test_parts() -> None:
    x = values(6, 6)
    mkldnn, quantized = x.to_mkldnn(), torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    assert torch.equal(summaries(mkldnn)[0], summaries(x)[0])
    assert torch.equal(summaries(quantized)[0], summaries(quantized.int_repr())[0])
    assert torch.equal(summaries(torch.complex(x, x))[0], summaries(torch.stack([x, x], -1))[0])
    assert len(summaries(x.to_sparse())) == 2 and len(summaries(x.to_sparse_csr())) == 3
    if hasattr(torch, "float4_e2m1fn_x2"):
        packed = torch.arange(8, dtype=torch.uint8)
        assert torch.equal(summaries(packed.view(torch.float4_e2m1fn_x2))[0], summaries(packed)[0])
