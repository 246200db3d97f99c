"""Rates of a device: measured on the one at hand, or fitted to the log of a step; and the files that plans read them from.

Measured ones replace the rates in the table of devices: matmuls, fused attention, memory, launches, the bus to the
node's CPU memory, and all-gathers where several ranks run. Attention is causal, with the FLOPs of all keys, as the
planner counts them.
"""

import json
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nemo_like._util.device_work import wait_for
from nemo_like._util.json_file import write_json
from nemo_like.distributed.launch import current_device, local_world_size, pick_device_type, rank, world_size
from nemo_like.planning.device_table import device_table
from nemo_like.planning.devices import RATES, Device, device_at_hand, rates_file, resolve_device
from nemo_like.planning.predictions.seconds import step_seconds
from nemo_like.planning.query import Choices, PlanQuery

# The linears of a layer of Llama 3 8B, (in, out): queries and output, keys and values, gate and up, down.
SHAPES = ((4096, 4096), (4096, 4096), (4096, 1024), (4096, 1024), (4096, 14336), (4096, 14336), (14336, 4096))
_LAUNCHES = 4  # Products that are timed as one, so that a launch does not count.
SECONDS = 3.0  # Most seconds of one measurement, of which there are at most ten.


def calibrate(seconds: float | None = None) -> Path:
    """Measure the device at hand, in less than a minute, write its rates to its file, and return the path.

    Where a process group is up, all ranks call this; all-gathers are measured, too, and rank 0 writes.

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
    """Return the FLOP/s of products: the median over `SHAPES`, of normal values, as the table has it."""
    tokens, part = (512, 16) if device.type == "cpu" else (8192, 1)

    def rate(width: int, out: int) -> float:
        left, right = (torch.randn(*size, device=device, dtype=dtype) for size in ((tokens, width), (out, width)))

        def run() -> None:
            for _ in range(_LAUNCHES):
                F.linear(left, right)

        return _LAUNCHES * 2.0 * tokens * width * out / _best(run, device, seconds / len(SHAPES))

    return statistics.median(rate(width // part, out // part) for width, out in SHAPES)


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
        dist.all_gather_single(whole, part)
        wait_for(device)
        best = min(best, time.perf_counter() - start)
    return part.numel() * (world_size() - 1) / best


MOST = 4.0  # Largest factor of rates; its inverse is the least.
_NUMBER = r"([\d.,]+)\s*([KM]?)"
# By program, the time or speed of a step in its log, and the unit: ``tokens`` are those of one GPU in a second.
_LOGS: Mapping[str, tuple[str, str]] = {
    "torchtitan": (rf"\bstep:\s*\d+\b.*\btps:\s*{_NUMBER}", "tokens"),
    "KempnerForge": (rf"\bstep_time={_NUMBER}s?", "seconds"),
    "nanotron": (rf"\belapsed_time_per_iteration_ms:\s*{_NUMBER}", "milliseconds"),
    "litgpt": (rf"\biter time:\s*{_NUMBER}\s*ms", "milliseconds"),
}
READ = f"1.83s, 950ms or 6120tok/s (of one GPU); a log of {', '.join(_LOGS)}"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Speed(NamedTuple):
    """Speed of a step as it was measured."""

    value: float
    unit: str  # ``seconds``, ``milliseconds``, or ``tokens`` (of one GPU in a second).

    def seconds(self, tokens: int | None, query: PlanQuery) -> float:
        """Return the seconds of a step of `query`; `tokens`: of one micro-batch of one rank.

        Raises:
            ValueError: it is given in tokens, and the model takes none.
        """
        if self.unit != "tokens":
            return self.value / (1000 if self.unit == "milliseconds" else 1)
        if not tokens:
            raise ValueError("The log has tokens per second, and this model takes no text. Give seconds: 1.83s.")
        job = query.job
        return tokens * query.microbatches / (job.tp.size * job.cp.size * job.pp.size) / self.value


def read_speed(log: str) -> Speed:
    """Return the speed that a log states: a number with a unit, or the median of a file's steps but for the first two.

    Raises:
        ValueError: it is neither, or no speed of a step is in the file.
    """
    if number := re.fullmatch(rf"\s*{_NUMBER}\s*(ms|s|tok/s)\s*", log):
        return Speed(_number(number), {"ms": "milliseconds", "s": "seconds", "tok/s": "tokens"}[number[3]])
    if not Path(log).is_file():
        raise ValueError(
            f"--calibrate-from is {log!r}, which is neither a number with a unit nor a file. Read are: {READ}."
        )
    text = _COLOUR.sub("", Path(log).read_text(encoding="utf-8", errors="replace"))
    if "train_runtime" in text:
        raise ValueError(
            f"{log} has train_runtime, which is the time of all steps with start-up and evaluation in it. Give the seconds "
            "of a step: 1.83s."
        )
    speeds = [([_number(line) for line in re.finditer(pattern, text)], unit) for pattern, unit in _LOGS.values()]
    values, unit = max(speeds, key=lambda each: len(each[0]))
    if len(values) < 4:
        raise ValueError(
            f"{log} has {len(values)} steps with a speed, and the first two are slow: give at least four. {READ}."
        )
    return Speed(statistics.median(values[2:]), unit)


def _number(match: re.Match[str]) -> float:
    value = float(match[1].replace(",", "")) * {"": 1.0, "K": 1e3, "M": 1e6}[match[2]]
    if not 0.0 < value < math.inf:
        raise ValueError(f"{match[0]!r} states {value:g}; a speed must be a positive number.")
    return value


def fitted_factor(query: PlanQuery, choices: Choices, seconds: float) -> float:
    """Return the factor of the device's rates of kernels with which a step of `query` takes `seconds`.

    Raises:
        ValueError: none within `MOST` does.
    """

    def off(power: float) -> float:
        other = query.under(query.job.change(gpu=at_factor(query.device, math.exp(power))))
        return math.log(step_seconds(other, choices).total / seconds)

    end = math.log(MOST)
    before, far = 0.0, off(0.0)
    at, first = max(-end, min(end, far)), far  # of a step that kernels alone take, the factor itself
    for _ in range(8):
        now = off(at)
        if abs(now) < 1e-3:
            return math.exp(at)
        if now == far:
            break
        before, at, far = at, max(-end, min(end, at - now * (at - before) / (now - far))), now
    raise ValueError(
        f"A step took {seconds:.4g} s, and {seconds * math.exp(first):.4g} s are predicted; no rates within {MOST:g} times "
        "those of the table explain that. Check the flags: the log must be of this job, on this GPU."
    )


def at_factor(device: Device, factor: float) -> Device:
    """Return `device` with its rates of kernels times `factor`."""
    return replace(
        device,
        name=f"{device.name} x {factor:.6g}",
        matmul_flops={kind: rate * factor for kind, rate in device.matmul_flops.items()},
        attention_flops={kind: rate * factor for kind, rate in device.attention_flops.items()},
        bandwidth=device.bandwidth * factor,
    )


def write_gpu(spec: str, factor: float, words: str, path: str) -> None:
    """Write the device `spec` with its rates of kernels times `factor`, as a file for ``--gpu``; `words`: its source."""
    table, name = device_table(), resolve_device(spec).name
    entry: dict[str, Any] = dict(table[name]) if name in table else json.loads(Path(spec).read_text(encoding="utf-8"))
    entry |= {
        name: entry[name] * factor for name in ("matmul", "matmul_fp8", "attention", "bandwidth") if name in entry
    }
    entry["sources"] = entry.get("sources", {}) | {"measured": words}
    entry.pop("match", None)
    write_json(Path(path), entry)
