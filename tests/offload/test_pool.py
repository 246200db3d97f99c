"""Host memory: blocks never overlap, come back whole, stay within the budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.offload.backends import ALIGNMENT, HostPool


def _pool(**kwargs) -> HostPool:  # type: ignore[no-untyped-def]
    return HostPool(lambda n: torch.empty(n, dtype=torch.uint8), **kwargs)


@settings(max_examples=60)
@given(st.lists(st.one_of(st.integers(1, 9000), st.just(None)), max_size=40), st.randoms(use_true_random=False))
def test_blocks_never_overlap_and_come_back_whole(steps, random) -> None:  # type: ignore[no-untyped-def]
    pool = _pool(slab_bytes=16384)
    out = {}
    for number, nbytes in enumerate(steps):
        if nbytes is None:
            if out:
                key = random.choice(sorted(out))
                block = out.pop(key)
                assert (block.bytes(block.nbytes) == key % 251).all()
                pool.give_back(block)
            continue
        block = pool.take(nbytes)
        assert block is not None and block.nbytes >= nbytes and block.lo % ALIGNMENT == 0
        block.bytes(block.nbytes).fill_(number % 251)
        out[number] = block
    assert pool.live_bytes == sum(block.nbytes for block in out.values())
    for key, block in out.items():
        assert (block.bytes(block.nbytes) == key % 251).all()
        pool.give_back(block)
    assert pool.live_bytes == 0
    assert all(block.nbytes == block.slab.numel() for block in pool.free)
    assert sum(block.nbytes for block in pool.free) == pool.reserved_bytes


def test_slabs_are_powers_of_two_and_reused() -> None:
    pool = _pool(slab_bytes=8192)
    large = pool.take(9000)
    assert large is not None and pool.reserved_bytes == 16384
    small = pool.take(100)  # fits beside it
    assert small is not None and pool.reserved_bytes == 16384
    pool.give_back(large)
    assert pool.take(9000) is not None and pool.reserved_bytes == 16384
    assert (pool.live_bytes, pool.peak_live_bytes) == (9216 + 512, 9216 + 512)


def test_the_budget_bounds_what_is_reserved() -> None:
    pool = _pool(budget_bytes=20000, slab_bytes=16384)
    assert pool.take(10000) is not None
    assert pool.take(9000) is None
    assert pool.refusal == "the host budget of 20000 bytes has 3616 bytes left and a slab of 16384 bytes is needed"
    assert pool.take(1000) is not None  # what is left of the slab
    assert pool.take(6000) is None
    assert pool.reserved_bytes == 16384


def test_a_budget_below_the_usual_slab_gets_smaller_slabs() -> None:
    pool = _pool(budget_bytes=4096)
    assert pool.take(1500) is not None and pool.take(1500) is not None
    assert pool.reserved_bytes == 2 * 2048


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory\nmore"), MemoryError("no more")])
def test_a_refused_allocation_is_no_exception(error: Exception) -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise error

    pool = HostPool(refuse)
    assert pool.take(10) is None
    assert pool.refusal == f"67108864 bytes of host memory were refused ({str(error).splitlines()[0]})"
    assert pool.live_bytes == 0
