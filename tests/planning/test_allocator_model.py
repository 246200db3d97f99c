"""The model of CUDA's caching allocator: exact bytes for sequences whose answer follows from its rules."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.options.memory import AllocatorConfig
from nemo_like.planning.memory_model.allocator import CachingAllocator, DeviceMemoryError
from tests.gpusim import PLACES, on_device, run_at

KIB, MIB = 1 << 10, 1 << 20
GROWING = AllocatorConfig(expandable_segments=True)


def _free_blocks(allocator: CachingAllocator) -> list[tuple[int, int]]:
    """(address, bytes) of every free block, by address."""
    return sorted((address, size) for pool in allocator._pools.values() for size, address, _ in pool.free)


@pytest.mark.parametrize(("sizes", "allocated", "reserved"), [
    ([1], 512, 2 * MIB),
    ([512], 512, 2 * MIB),
    ([513], 1024, 2 * MIB),
    ([MIB], MIB, 2 * MIB),
    ([MIB, MIB], 2 * MIB, 2 * MIB),
    ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
    ([MIB + 1], MIB + 512, 20 * MIB),
    ([9 * MIB, 9 * MIB], 18 * MIB, 20 * MIB),
    ([9 * MIB, 9 * MIB, 9 * MIB], 27 * MIB, 40 * MIB),
    ([10 * MIB], 10 * MIB, 10 * MIB),
    ([10 * MIB - 1], 10 * MIB, 10 * MIB),  # rounded before it is compared
    ([10 * MIB + 1], 10 * MIB + 512, 12 * MIB),
    ([11 * MIB - 512], 11 * MIB - 512, 12 * MIB),
    ([11 * MIB], 12 * MIB, 12 * MIB),  # 1 MiB over and no more: not split, and all of it counts as allocated
    ([33 * MIB], 34 * MIB, 34 * MIB),
])  # fmt: skip
def test_sizes_of_segments(sizes, allocated, reserved):
    allocator = CachingAllocator(AllocatorConfig())
    for size in sizes:
        allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


@pytest.mark.parametrize(("divisions", "size", "rounded"), [
    (0, 1200, 1536), (4, 1200, 1536), (4, 2049, 2560), (4, 5 * MIB + 1, 6 * MIB), (4, 4 * MIB, 4 * MIB),
    (8, 5 * MIB + 1, 5 * MIB + MIB // 2), (1, 5 * MIB + 1, 5 * MIB + 512),
])  # fmt: skip
def test_rounding_to_steps_between_powers_of_two(divisions, size, rounded):
    assert CachingAllocator(AllocatorConfig(roundup_power2_divisions=divisions)).rounded(size) == rounded


def test_best_fit_at_the_lowest_address():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 30, 30, 60)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(29 * MIB).address == blocks[1].address
    assert allocator.allocate(29 * MIB).address == blocks[2].address
    assert allocator.allocate(29 * MIB).address == blocks[0].address
    assert allocator.reserved == 160 * MIB


def test_fragments_make_it_reserve_more_than_is_free():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(100 * MIB))
    parts = [allocator.allocate(10 * MIB) for _ in range(10)]
    for part in parts[::2]:
        allocator.free(part)
    assert (allocator.allocated, allocator.reserved) == (50 * MIB, 100 * MIB)
    allocator.allocate(20 * MIB)  # 50 MiB are free, in pieces of 10
    assert (allocator.allocated, allocator.reserved) == (70 * MIB, 120 * MIB)
    allocator.free(parts[1])  # its neighbours are free: 30 MiB in one piece
    allocator.allocate(30 * MIB)
    assert (allocator.allocated, allocator.reserved) == (90 * MIB, 120 * MIB)


def test_growing_segments_do_not_fragment_so():
    allocator = CachingAllocator(GROWING)
    blocks = [allocator.allocate(size) for size in (30 * MIB, 50 * MIB, 1 * MIB)]
    assert allocator.reserved == 80 * MIB + 2 * MIB
    allocator.free(blocks[1])
    blocks[1] = allocator.allocate(70 * MIB)  # grows by a page of 20 MiB
    assert (allocator.allocated, allocator.reserved) == (101 * MIB, 102 * MIB)
    allocator.free(blocks[0])
    allocator.allocate(25 * MIB)
    assert allocator.reserved == 102 * MIB and _free_blocks(allocator)[0][1] == 5 * MIB


def test_the_growing_end_is_the_last_choice():
    allocator = CachingAllocator(GROWING)
    first, _, last = (allocator.allocate(size * MIB) for size in (30, 2, 8))
    allocator.free(first)
    allocator.free(last)
    # 8 MiB at the end fit best by size, but they can grow: the 30 MiB in front are taken.
    assert allocator.allocate(4 * MIB).address == first.address


def test_streams_share_nothing():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(64 * MIB, stream="compute"))
    allocator.allocate(64 * MIB, stream="gather")
    assert allocator.reserved == 128 * MIB
    allocator.allocate(64 * MIB, stream="compute")
    assert allocator.reserved == 128 * MIB


def test_a_limit_of_splitting():
    allocator = CachingAllocator(AllocatorConfig(max_split_size=64 * MIB))
    large, small = allocator.allocate(100 * MIB), allocator.allocate(40 * MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(20 * MIB)  # from the 40 MiB: the 100 serve no small request
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 170 * MIB
    assert allocator.allocate(90 * MIB).size == 100 * MIB  # within 20 MiB, and not split
    assert allocator.reserved == 170 * MIB
    allocator.allocate(64 * MIB)
    assert allocator.reserved == 234 * MIB


def test_a_small_block_is_split_down_to_the_smallest_size():
    allocator = CachingAllocator()
    twice, _ = allocator.allocate(1024), allocator.allocate(512)  # the second keeps the first from its segment's rest
    allocator.free(twice)
    assert [allocator.allocate(512).size for _ in range(2)] == [512, 512]


def test_a_block_above_the_limit_serves_what_is_less_than_a_large_segment_smaller():
    allocator = CachingAllocator(AllocatorConfig(max_split_size=64 * MIB))
    allocator.free(allocator.allocate(100 * MIB))
    assert allocator.allocate(80 * MIB).size == 80 * MIB  # 20 MiB smaller: a segment of its own
    assert allocator.allocate(82 * MIB).size == 100 * MIB


def test_segments_go_back_when_memory_runs_out():
    allocator = CachingAllocator(memory=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(10 * MIB)  # splits those 60 MiB
    allocator.free(allocator.allocate(40 * MIB, stream=1))
    assert (allocator.reserved, allocator.retries) == (100 * MIB, 0)
    allocator.allocate(30 * MIB, stream=2)  # the whole segment of stream 1 goes
    assert (allocator.reserved, allocator.retries) == (90 * MIB, 1)
    with pytest.raises(DeviceMemoryError, match="94371840 are reserved, of which 41943040"):
        allocator.allocate(51 * MIB)
    assert allocator.peak_reserved == 100 * MIB


def test_pages_of_growing_segments_go_back_too():
    allocator = CachingAllocator(GROWING, memory=120 * MIB)
    blocks = [allocator.allocate(30 * MIB) for _ in range(3)]
    assert allocator.reserved == 100 * MIB
    allocator.free(blocks[1])  # 30 to 60 MiB: one whole page of 20, at 40
    allocator.allocate(40 * MIB, stream=1)
    assert (allocator.reserved, allocator.retries) == (120 * MIB, 1)
    with pytest.raises(DeviceMemoryError):
        allocator.allocate(30 * MIB)


def test_settings_as_torch_reads_them():
    text = "backend:native, expandable_segments:True,max_split_size_mb:128,roundup_power2_divisions:4,pinned_use:False"
    assert AllocatorConfig.parse(text) == AllocatorConfig(True, 128 * MIB, 4)
    assert AllocatorConfig.parse("") == AllocatorConfig()
    for wrong in ("backend:cudaMallocAsync", "expandable_segments", "roundup_power2_divisions:[256:1,>:2]",
                  "max_split_size_mb:19", "roundup_power2_divisions:3"):  # fmt: skip
        with pytest.raises(ValueError, match=r"allocator|no value|list|no less|power of two"):
            AllocatorConfig.parse(wrong)


_SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(MIB, 64 * MIB))
_TURNS = st.lists(st.tuples(st.booleans(), _SIZES, st.integers(0, 1), st.integers(0, 99)), max_size=40)
_CONFIGS = st.builds(
    AllocatorConfig, st.booleans(), st.sampled_from([None, 20 * MIB, 40 * MIB]), st.sampled_from([0, 2, 8])
)


def _run(turns, config, memory=None):
    allocator, live = CachingAllocator(config, memory), []
    for frees, size, stream, which in turns:
        if frees and live:
            allocator.free(live.pop(which % len(live)))
        else:
            try:
                block = allocator.allocate(size, stream)
            except DeviceMemoryError:
                continue
            assert block.size >= size
            live.append(block)
        _check(allocator, live)
    return allocator, live


def _check(allocator, live):
    spans = sorted([(b.address, b.size) for b in live] + _free_blocks(allocator))
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))  # no two overlap
    assert sum(size for _, size in spans) == allocator.reserved  # nothing is lost
    assert sum(b.size for b in live) == allocator.allocated <= allocator.reserved <= allocator.peak_reserved


@settings(max_examples=40, deadline=None)
@given(_TURNS, _CONFIGS, st.sampled_from([None, 100 * MIB]))
def test_blocks_never_overlap_and_all_merge_again(turns, config, memory):
    allocator, live = _run(turns, config, memory)
    again, _ = _run(turns, config, memory)
    assert (again.reserved, again.peak_reserved, _free_blocks(again)) == (
        allocator.reserved, allocator.peak_reserved, _free_blocks(allocator),
    )  # fmt: skip
    for block in live:
        allocator.free(block)
    _check(allocator, [])
    spans = _free_blocks(allocator)
    if config.expandable_segments and memory is None:
        assert len(spans) <= 4  # a segment per stream and kind, in one piece
    allocator.release_cached()
    assert allocator.reserved == 0 and not _free_blocks(allocator)


def _drive_both(place: str, config: AllocatorConfig) -> None:
    draw, module = random.Random(0), torch.get_device_module(place)
    module.empty_cache()
    start = module.memory_reserved()
    allocator, live = CachingAllocator(config), []
    for _ in range(400):
        if live and draw.random() < 0.45:
            tensor, block = live.pop(draw.randrange(len(live)))
            del tensor
            allocator.free(block)
        else:
            size = int(2 ** draw.uniform(8, 25))
            live.append((torch.empty(size, dtype=torch.uint8, device=place), allocator.allocate(size)))
        assert module.memory_reserved() - start == allocator.reserved


@PLACES
def test_against_a_device(place):
    run_at(place, _drive_both, AllocatorConfig())


def test_against_a_device_whose_segments_grow():
    on_device(_drive_expandable, expandable=True)


def _drive_expandable(_):
    _drive_both("gpusim", AllocatorConfig(expandable_segments=True))
