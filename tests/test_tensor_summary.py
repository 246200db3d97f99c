"""The numbers by which verification compares two tensors."""

import math
import random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_like._util import tensor_summary as module
from nemo_like._util.tensor_summary import summary
from tests.models.blocks import Operators

PIECE = 1024 * 2048
SHAPES = [(), (1,), (7,), (1024,), (1025,), (3, 5, 7), (PIECE,), (PIECE + 1,), (3, PIECE), (2, 3, PIECE // 2 + 3)]


def numbers(tensor: Tensor) -> Tensor:
    found = summary(tensor)
    assert found is not None and found.shape == (3,)
    return found


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_are_what_they_say(shape: tuple[int, ...]) -> None:
    x = values(*shape)
    rows, columns, norm = numbers(x).tolist()
    assert math.isclose(norm, x.norm().item(), rel_tol=1e-5)
    # By the signs of single elements: of its row, and of its column.
    for at in {0, x.numel() // 2, x.numel() - 1}:
        single = torch.zeros(x.numel())
        single[at] = 1
        assert numbers(single.view(shape)).abs().tolist() == [1, 1, 1]
    assert max(abs(rows), abs(columns)) < 6 * norm + 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tensor_is_read_by_few_operators_without_a_wider_copy(dtype: torch.dtype) -> None:
    """On fake tensors: hidden states of an 8B model's FFN at 4k and at 16k tokens; the larger one is not copied."""
    for tokens, copied in ((4096, 1), (16_384, 0)):
        module._signs.cache_clear()
        with FakeTensorMode(), Operators() as counted:
            x = torch.empty(1, tokens, 14_336, dtype=dtype)
            made = len(counted.kernels)
            module._of_piece(x)
        module._signs.cache_clear()  # of another fake mode
        signs = [name for name in counted.kernels if name.split(".")[0] in ("randint", "mul", "sub", "_to_copy")]
        assert len(counted.kernels) - made - len(signs) <= 8, counted.kernels
        assert counted.kernels.count("nan_to_num.default") == copied and counted.most == x.nbytes


@pytest.mark.parametrize("shape", [(64, 96), (3, 1000, 1100)])
def test_how_the_values_lie_in_memory_does_not_count(shape: tuple[int, ...]) -> None:
    """But for rounding."""
    x = values(*shape)
    wanted = numbers(x)
    transposed = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    strided = torch.empty(*shape, 2)[..., 0].copy_(x)
    assert transposed.stride() != x.stride() != strided.stride()
    for other in (transposed, strided):
        assert (numbers(other) - wanted).abs().max() < 1e-5 * wanted[2]
    assert torch.equal(numbers(x[:1].expand(2, *shape[1:])), numbers(torch.cat([x[:1]] * 2)))


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_a_difference_moves_the_signed_sums_by_its_norm(share: float) -> None:
    x = values(1000, 1000)
    torch.manual_seed(0)
    distances = []
    for _ in range(40):
        noise = torch.randn_like(x) * (torch.rand_like(x) < share)
        distances.append((numbers(x + noise) - numbers(x))[:2].abs() / noise.norm())
    found = torch.stack(distances)
    root_mean_square = found.square().mean(0).sqrt()
    assert root_mean_square.min() > 0.7 and root_mean_square.max() < 1.3 and found.max() < 4


def test_elements_that_change_places_are_seen() -> None:
    x = values(300, 400)
    for other in (x.flip(0), x.flip(1), x.roll(1, 0), x.roll(1, 1)):
        assert (numbers(other) - numbers(x))[:2].abs().max() > 0.01 * x.norm()


def test_what_is_not_finite_counts_by_place_and_kind() -> None:
    x = values(50, 50)
    signed = []
    for value, at in ((math.nan, 3), (math.inf, 3), (-math.inf, 3), (math.nan, 4)):
        odd = x.clone()
        odd.view(-1)[at] = value
        found = numbers(odd)
        assert found.isfinite().all()
        signed.append(tuple(found[:2].tolist()))
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
