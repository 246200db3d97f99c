"""What kernels take beyond their outputs, against the allocator's events."""

from __future__ import annotations

import pytest
import torch

from nemo_like.bench.measured_step import cpu_events
from nemo_like.planning.trace.meter import TracedBytes

SHAPES = [  # batch, channels in, side, channels out, kernel, stride, padding, groups, channels last
    (2, 3, 64, 16, 3, 1, 1, 1, False),
    (2, 3, 64, 48, 4, 4, 0, 1, False),
    (2, 3, 64, 32, 16, 16, 0, 1, False),
    (2, 16, 28, 32, 1, 1, 0, 1, False),
    (2, 32, 28, 64, 3, 2, 1, 1, False),
    (2, 24, 20, 40, 3, 1, 1, 1, False),
    (2, 32, 28, 32, 1, 2, 0, 1, False),
    (4, 64, 14, 64, 3, 1, 1, 64, False),
    (2, 96, 14, 96, 7, 1, 3, 96, True),
    (4, 4, 32, 4, 3, 1, 1, 4, False),
    (2, 64, 14, 64, 3, 1, 1, 64, True),
    (2, 64, 2, 64, 3, 1, 1, 64, True),
    (2, 16, 28, 32, 3, 2, 1, 1, True),
    (2, 64, 14, 64, 3, 1, 1, 1, True),
    (2, 64, 28, 64, 1, 1, 0, 4, False),
    (2, 16, 28, 96, 3, 2, 1, 1, False),
    (2, 64, 14, 64, 7, 1, 3, 1, False),
    (2, 64, 28, 64, 3, 2, 1, 64, False),
    (2, 64, 14, 64, 7, 1, 3, 64, False),
]
EXACT = [
    (2, 64, 14, 64, 3, 1, 1, 64, True),
    (2, 16, 28, 32, 3, 2, 1, 1, True),
    (2, 64, 14, 64, 3, 1, 1, 1, True),
    (2, 64, 28, 64, 3, 2, 1, 64, False),
    (2, 40, 28, 24, 3, 2, 1, 1, False),
]
"""Those whose need is known exactly."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_convolution_takes_no_more_than_is_said(shape: tuple) -> None:
    """In forward, and in a backward with and without the gradient of its input."""
    batch, inner, side, outer, kernel, stride, padding, groups, last = shape
    image = torch.randn(batch, inner, side, side)
    image = image.to(memory_format=torch.channels_last) if last else image
    weight = torch.randn(outer, inner // groups, kernel, kernel)
    layout = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    out = torch.ops.aten.convolution(image, weight, torch.zeros(outer), *layout)
    grad = torch.ones_like(out)

    def check(run) -> None:
        run()
        real = max(cpu_events(run))
        with TracedBytes([image, weight, grad]) as meter:
            run()
        assert real <= meter.peak * 1.01 + 4096, shape

    check(lambda: torch.ops.aten.convolution(image, weight, torch.zeros(outer), *layout))
    for wanted in (True, False):
        check(
            lambda wanted=wanted: torch.ops.aten.convolution_backward(
                grad, image, weight, [outer], *layout, [wanted, True, True]
            )
        )


@pytest.mark.parametrize("shape", EXACT)
def test_a_convolutions_backward_takes_what_is_said(shape: tuple) -> None:
    """With channels last no picture is put into blocks; a depthwise weight was said to take up to 40 times too much."""
    batch, inner, side, outer, kernel, stride, padding, groups, last = shape
    image = torch.randn(batch, inner, side, side)
    image = image.to(memory_format=torch.channels_last) if last else image
    weight = torch.randn(outer, inner // groups, kernel, kernel)
    layout = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    grad = torch.ones_like(torch.ops.aten.convolution(image, weight, None, *layout))
    for wanted in ([True, False, False], [False, True, False], [True, True, False]):

        def run(wanted: list = wanted) -> object:
            return torch.ops.aten.convolution_backward(grad, image, weight, [0], *layout, wanted)

        with TracedBytes([image, weight, grad]) as meter:
            run()
        assert abs(meter.peak - max(cpu_events(run))) <= meter.peak * 0.02 + 8192, (shape, wanted)


def test_attention_without_a_fused_kernel_looks_for_empty_rows() -> None:
    scores = torch.randn(4, 4, 64, 64)

    def run() -> torch.Tensor:
        return torch.ops.aten._safe_softmax(scores, -1)

    with TracedBytes([scores]) as meter:
        run()
    assert meter.peak == scores.nbytes + scores.numel() + scores.numel() // 64
    assert max(cpu_events(run)) <= meter.peak + 64
