"""What kernels take beyond their outputs, against the allocator's events."""

from __future__ import annotations

import torch

from nemo_like.planning.trace.meter import TracedBytes
from tests.allocator_events import cpu_events


def test_attention_without_a_fused_kernel_looks_for_empty_rows() -> None:
    scores = torch.randn(4, 4, 64, 64)

    def run() -> torch.Tensor:
        return torch.ops.aten._safe_softmax(scores, -1)

    with TracedBytes([scores]) as meter:
        run()
    assert meter.peak == scores.nbytes + scores.numel() + scores.numel() // 64
    assert max(cpu_events(run)) <= meter.peak + 64
