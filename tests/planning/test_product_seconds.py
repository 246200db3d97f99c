"""Seconds of matrix products by their shape. Judges: published TFLOPS, and the laws of tiles and of the peak."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.planning.device_table import known_devices
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.roofline import kernel_seconds, product_seconds
from nemo_like.planning.selection.layer import backward_times
from nemo_like.planning.trace.block import OpRecord

MM, GROUPED = torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default


def record(rows: int, inner: int, columns: int, *, groups: int = 0, grads: int = 2) -> OpRecord:
    moved = 2 * (rows * inner + max(1, groups) * inner * columns + rows * columns)
    op = GROUPED if groups else MM
    flops = 2 * rows * inner * columns
    return OpRecord(op, 0, ((rows, columns),), 2 * rows * columns, flops, moved, (), False, False, True, grads=grads)


def test_short_inner_dimensions_are_as_slow_as_published() -> None:
    # https://github.com/deepseek-ai/DeepGEMM, first README, H800, FP8: (rows, inner, columns), TFLOPS; dense, then experts.
    published = {
        (4096, 512, 32_768): 590,
        (4096, 1536, 24_576): 990,
        (4096, 2048, 7168): 1025,
        (4096, 7168, 4096): 1304,
        (4096, 16_384, 7168): 1358,
        (32_768, 7168, 4096): 1297,
        (32_768, 2048, 7168): 1099,
    }
    # Its kernels choose tiles that fill the processors, and reach 1,320 TFLOPS at 8,192, between two of these.
    h800 = replace(resolve_device("h100"), matmul_flops={"half": 1.32e15}, processors=1)
    for shape, tflops in published.items():
        op = record(*shape)
        assert op.flops / product_seconds(op, h800)[0] / 1e12 == pytest.approx(tflops, rel=0.05)


@given(
    name=st.sampled_from([name for name in known_devices() if name != "cpu"]),
    rows=st.integers(1, 1 << 17),
    inner=st.integers(1, 1 << 15),
    columns=st.integers(1, 1 << 17),
    groups=st.sampled_from([0, 1, 128]),
)
def test_no_product_is_faster_than_its_flops_or_its_bytes(
    name: str, rows: int, inner: int, columns: int, groups: int
) -> None:
    device, op = resolve_device(name), record(rows, inner, columns, groups=groups)
    fastest = max(op.flops / max(device.peak_flops, device.matmul_flops["half"]), op.moved / device.bandwidth)
    assert kernel_seconds(op, device) >= fastest * 0.999_999
    assert kernel_seconds(op, device) * backward_times(op, device) >= 2 * fastest * 0.999_999
    frozen = backward_times(replace(op, grads=1), device)
    assert 0 < frozen < backward_times(op, device)


def test_experts_of_qwen_take_less_than_their_whole_layer_does_and_more_than_dense_products() -> None:
    # https://github.com/ByteDance-Seed/VeOmni/pull/460: 32,768 tokens, width 2,048, 128 experts of 768, 8 a token,
    # on an H100: 10.2 ms forward with torch._grouped_mm, of which permutation, activation and sums are a part.
    device, rows = resolve_device("h100"), 8 * 32_768
    ops = [record(rows, 2048, 1536, groups=128), record(rows, 768, 2048, groups=128)]
    seconds = sum(kernel_seconds(op, device) for op in ops)
    assert sum(op.flops for op in ops) / device.matmul_flops["half"] < seconds < 10.218e-3


def test_more_tokens_are_never_faster() -> None:
    device = resolve_device("h100")
    seconds = [kernel_seconds(record(rows, 4096, 4096), device) for rows in range(128, 20_000, 128)]
    assert seconds == sorted(seconds)
