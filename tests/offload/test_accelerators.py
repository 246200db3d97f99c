"""The same promises on an accelerator: bitwise, no leak, no race.

The simulated device reports a race by itself. On a GPU this file is the stream test under ``TORCH_CUDA_SANITIZER=1``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_like.offload import apply_offloading, offload_activations
from nemo_like.offload.backends import Backend
from nemo_like.options import OffloadConfig
from tests.checks import assert_bitwise
from tests.gpusim import PLACES, run_at
from tests.offload.cases import gradients, stack_of, trained

WIDTH = 32


def _backend(place: str, **options: bool) -> Backend:
    return Backend(torch.device(place, _module(place).current_device()), **options)


def _module(place: str) -> Any:
    return torch.get_device_module(place)


def _stack(place: str, layer: Callable[..., Any], count: int = 6) -> Any:
    return stack_of(layer, count=count, width=WIDTH).to(place)


def _steps(place: str, options: dict[str, bool], inflight: int) -> None:
    model = _stack(place, lambda x, scale: (x * scale).sin() @ x.t()[:WIDTH, :WIDTH] / WIDTH)
    x = torch.randn(WIDTH, WIDTH, device=place)
    expected = trained(model, x)
    backend = _backend(place, **options)
    settings = OffloadConfig(mode="all", min_bytes=0, max_inflight_bytes=inflight)
    offloader = apply_offloading(model, list(model.layers), settings, backend=backend)
    for _ in range(3):
        assert_bitwise(trained(model, x), expected)
    assert offloader.stats.moved_bytes > 0 and (offloader.stats.reloads > 0 or inflight > 1)


@PLACES
@pytest.mark.parametrize("options", [{}, {"pin_memory": False}, {"use_streams": False}], ids=str)
@pytest.mark.parametrize("inflight", [1, 1 << 13, 1 << 30])
def test_gradients_are_bitwise_and_nothing_races(place: str, options: dict[str, bool], inflight: int) -> None:
    run_at(place, _steps, options, inflight)


def _forward_on_a_side_stream(place: str) -> None:
    module, model = _module(place), _stack(place, lambda x, scale: (x * scale).sin())
    x = torch.randn(WIDTH, WIDTH, device=place)
    expected = trained(model, x)
    offloader = offload_activations(OffloadConfig(mode="all", min_bytes=0, max_inflight_bytes=1), model=model)
    side = module.Stream()
    for _ in range(5):
        side.wait_stream(module.current_stream())
        with module.stream(side), offloader:
            loss = model(x).pow(2).sum()
        module.current_stream().wait_stream(side)
        loss.backward()
        module.synchronize()
        assert_bitwise(gradients(model), expected)


@PLACES
def test_forward_on_a_side_stream(place: str) -> None:
    run_at(place, _forward_on_a_side_stream)


def _bytes_are_flat(place: str) -> None:
    module, model = _module(place), _stack(place, lambda x, scale: (x * scale).exp())
    settings = OffloadConfig(mode="all", min_bytes=0, max_inflight_bytes=1 << 13)
    offloader = apply_offloading(model, list(model.layers), settings)
    x = torch.randn(WIDTH, WIDTH, device=place) / WIDTH
    seen = []
    for step in range(20):
        model.zero_grad()
        model(x).sum().backward()
        if step in (2, 19):
            module.synchronize()
            stats = offloader.collect()
            seen.append((module.memory_allocated(), stats.host_live_bytes))
    assert seen[0] == seen[1] and seen[0][1] == 0


@PLACES
def test_device_and_host_bytes_are_flat(place: str) -> None:
    run_at(place, _bytes_are_flat)


def _holds_less(place: str) -> None:
    module, held = _module(place), {}
    for mode in ("none", "all"):
        model = _stack(place, lambda x, scale: (x * scale).exp().sin(), count=12)
        apply_offloading(model, list(model.layers), OffloadConfig(mode=mode, min_bytes=0, max_inflight_bytes=1 << 14))
        x = torch.randn(8 * WIDTH, WIDTH, device=place)
        module.synchronize()
        base = module.memory_allocated()
        loss = model(x).sum()
        module.synchronize()
        held[mode] = module.memory_allocated() - base
        del loss
    assert held["all"] < 0.4 * held["none"]


@PLACES
def test_the_device_holds_less(place: str) -> None:
    run_at(place, _holds_less)


def _cpu_tensors(place: str) -> None:
    with offload_activations(OffloadConfig(mode="all", min_bytes=0), backend=_backend(place)) as offloader:
        (torch.randn(64, requires_grad=True) * 2).sin()
    assert offloader.stats.moved_bytes == 0 and offloader.stats.kept_count["on the host already"] == 1


@PLACES
def test_tensors_on_the_cpu_stay_there(place: str) -> None:
    run_at(place, _cpu_tensors)
