"""Bytes by the events of the CPU's allocator do not depend on what was measured before in the process."""

from __future__ import annotations

import pytest
import torch

from tests.allocator_events import AllocatorEvents


@pytest.mark.compat
def test_memory_older_than_the_measurement_does_not_count_whatever_was_measured_before() -> None:
    first = AllocatorEvents()
    first.start()
    blocks = [torch.empty(1 << 13) for _ in range(8)]
    seen = {block.data_ptr() for block in blocks}
    assert max(first.stop()) == 8 * 4 << 13
    del blocks  # the profiler does not see their end
    older = [torch.empty(1 << 13) for _ in range(64)]
    again = [block for block in older if block.data_ptr() in seen]
    if not again:
        pytest.skip("the allocator gave none of the addresses again")
    older = again[:1]
    del again
    second = AllocatorEvents()
    second.start()
    newer = torch.empty(1 << 10)
    older.clear()
    made = torch.empty(1 << 16)
    del newer
    assert second.stop() == [0, 4096, 4096 + (4 << 16), 4 << 16]
    assert made.numel() == 1 << 16
