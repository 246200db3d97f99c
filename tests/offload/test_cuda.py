"""The same promises on a GPU: bitwise, no leak, no race. Under ``TORCH_CUDA_SANITIZER=1`` this file is the stream test."""

from __future__ import annotations

import pytest
import torch

from nemo_like.offload import apply_offloading, offload_activations
from nemo_like.options import OffloadConfig
from tests.offload.cases import assert_same, gradients, stack_of
from tests.offload.journal import JournaledAccelerator, find_hazards

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = 512


def _backend(**options: bool) -> JournaledAccelerator:
    return JournaledAccelerator(torch.device("cuda", torch.cuda.current_device()), **options)


@pytest.mark.parametrize("options", [{}, {"pin_memory": False}, {"use_streams": False}], ids=str)
@pytest.mark.parametrize("inflight", [1, 1 << 20, 1 << 30])
def test_gradients_are_bitwise_and_nothing_races(options: dict[str, bool], inflight: int) -> None:
    model = stack_of(lambda x, scale: (x * scale).sin() @ x.t()[:WIDTH, :WIDTH] / WIDTH, count=6, width=WIDTH).cuda()
    x = torch.randn(WIDTH, WIDTH, device="cuda")
    model(x).sum().backward()
    expected = gradients(model)
    backend = _backend(**options)
    settings = OffloadConfig(mode="all", min_bytes=0, max_inflight_bytes=inflight)
    offloader = apply_offloading(model, list(model.layers), settings, backend=backend)
    for _ in range(5):
        model(x).sum().backward()
        assert_same(gradients(model), expected)
    assert offloader.stats.reloads > 0
    assert find_hazards(backend.journal) == []


def test_forward_on_a_side_stream() -> None:
    model = stack_of(lambda x, scale: (x * scale).sin(), count=6, width=WIDTH).cuda()
    x = torch.randn(WIDTH, WIDTH, device="cuda")
    model(x).sum().backward()
    expected = gradients(model)
    offloader = offload_activations(OffloadConfig(mode="all", min_bytes=0, max_inflight_bytes=1), model=model)
    side = torch.cuda.Stream()
    for _ in range(5):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), offloader:
            loss = model(x).sum()
        torch.cuda.current_stream().wait_stream(side)
        loss.backward()
        torch.cuda.synchronize()
        assert_same(gradients(model), expected)


def test_device_and_host_bytes_are_flat() -> None:
    model = stack_of(lambda x, scale: (x * scale).exp(), count=6, width=WIDTH).cuda()
    settings = OffloadConfig(mode="all", min_bytes=0, max_inflight_bytes=1 << 20)
    offloader = apply_offloading(model, list(model.layers), settings)
    x = torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH
    seen = []
    for step in range(200):
        model.zero_grad()
        model(x).sum().backward()
        if step in (2, 199):
            torch.cuda.synchronize()
            stats = offloader.collect()
            seen.append((torch.cuda.memory_allocated(), stats.host_live_bytes, stats.host_reserved_bytes))
    assert seen[0] == seen[1] and seen[0][1] == 0


def test_the_device_holds_less() -> None:
    held = {}
    for mode in ("none", "all"):
        model = stack_of(lambda x, scale: (x * scale).exp().sin(), count=12, width=WIDTH).cuda()
        apply_offloading(model, list(model.layers), OffloadConfig(mode=mode, min_bytes=0, max_inflight_bytes=1 << 20))
        x = torch.randn(8 * WIDTH, WIDTH, device="cuda")
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        loss = model(x).sum()
        torch.cuda.synchronize()
        held[mode] = torch.cuda.memory_allocated() - base
        del loss
    assert held["all"] < 0.4 * held["none"]


def test_tensors_on_the_cpu_stay_there() -> None:
    with offload_activations(OffloadConfig(mode="all", min_bytes=0), backend=_backend()) as offloader:
        (torch.randn(64, requires_grad=True) * 2).sin()
    assert offloader.stats.moved_bytes == 0 and offloader.stats.kept_count["on the host already"] == 1
