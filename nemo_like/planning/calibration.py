"""Rates of the device at hand, measured, and the file that later plans read them from.

They replace the rates in the table of devices: matrix products, fused attention, memory, launches, the bus to the host, and
what ranks send each other where several run. Attention is causal, with the FLOPs of all keys, as the planner counts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nemo_like._util.device_work import wait_for
from nemo_like._util.json_file import write_json
from nemo_like.distributed.launch import current_device, local_world_size, pick_device_type, rank, world_size
from nemo_like.planning.devices import RATES, device_at_hand, rates_file

SECONDS = 3.0
"""Most seconds of one measurement, of which there are at most ten."""


def calibrate(seconds: float | None = None) -> Path:
    """Measure the device at hand, in less than a minute, write its rates to its file, and return the path.

    Where a process group is up, all ranks call this; what they send each other is measured, too, and rank 0 writes.

    Args:
        seconds: most seconds of one measurement (default: `SECONDS`).

    Raises:
        OSError: the file cannot be written.
    """
    seconds = SECONDS if seconds is None else seconds
    kind = pick_device_type()
    device = current_device(kind)
    rates = {
        "matmul_half": _matmul(device, torch.bfloat16, seconds),
        "matmul_single": _matmul(device, torch.float32, seconds),
        "attention_half": _attention(device, torch.bfloat16, seconds),
        "attention_single": _attention(device, torch.float32, seconds),
        "bandwidth": _memory(device, seconds),
        "launch_seconds": _launch(device),
    }
    if kind == "cuda":
        rates["host_link"] = _host_link(device, seconds)
    if dist.is_initialized() and world_size() > 1:
        rates["nvlink" if local_world_size() == world_size() else "network"] = _gather(device)
    assert rates.keys() <= RATES.keys()
    at_hand = device_at_hand()
    path = rates_file(at_hand)
    if rank() == 0:
        about = {
            "device": at_hand.name,
            "torch": torch.__version__,
            "measured": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, about | {"rates": rates})
    if dist.is_initialized():
        dist.barrier()
    return path


def _best(run: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Return the shortest of several runs, each between two waits for the device."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds / 2
    for turn in range(50):
        wait_for(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        best = min(best, time.perf_counter() - start)
        if turn >= 2 and time.perf_counter() > end:
            break
    return best


def _largest(rate: Callable[[int], float], sizes: tuple[int, ...], seconds: float) -> float:
    """Return the best rate over sizes, from the smallest on, till the time is over."""
    best, end = 0.0, time.perf_counter() + seconds
    for size in sizes:
        best = max(best, rate(size))
        if time.perf_counter() > end:
            break
    return best


def _sizes(device: torch.device, cpu: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return cpu if device.type == "cpu" else other


def _matmul(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Return the FLOP/s of square products."""

    def rate(size: int) -> float:
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        return 2.0 * size**3 / _best(lambda: left @ right, device, seconds / 8)

    return _largest(rate, _sizes(device, (256, 512, 1024), (2048, 4096, 8192)), seconds / 2)


@torch.no_grad()
def _attention(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Return the FLOP/s of causal attention, with heads of 64, on a GPU of 128."""
    heads, width = (4, 64) if device.type == "cpu" else (16, 128)

    def rate(tokens: int) -> float:
        query, key, value = (torch.randn(1, heads, tokens, width, device=device, dtype=dtype) for _ in range(3))

        def run() -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        return 4.0 * heads * tokens**2 * width / _best(run, device, seconds / 8)

    return _largest(rate, _sizes(device, (128, 512, 1024), (2048, 4096, 8192)), seconds / 2)


def _memory(device: torch.device, seconds: float) -> float:
    """Return the bytes per second, read and written, of a copy that no cache holds."""
    source = torch.zeros((64 << 20) if device.type == "cpu" else (1 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() / _best(lambda: target.copy_(source), device, seconds)


def _launch(device: torch.device) -> float:
    """Return the seconds from one small kernel to the next."""
    small, count = torch.zeros(8, device=device), 200

    def run() -> None:
        for _ in range(count):
            small.add_(1.0)

    return _best(run, device, 1.0) / count


def _host_link(device: torch.device, seconds: float) -> float:
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    return host.numel() / _best(lambda: there.copy_(host, non_blocking=True), device, seconds)


def _gather(device: torch.device) -> float:
    """Return the bytes per second that a rank receives in an all-gather. A collective: as many runs on each rank."""
    part = torch.zeros((4 << 20) if device.type == "cpu" else (64 << 20), dtype=torch.uint8, device=device)
    whole = torch.empty(part.numel() * world_size(), dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(5):
        wait_for(device)
        dist.barrier()
        start = time.perf_counter()
        dist.all_gather_into_tensor(whole, part)
        wait_for(device)
        best = min(best, time.perf_counter() - start)
    return part.numel() * (world_size() - 1) / best
