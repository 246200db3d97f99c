"""Rates of a device: measured on the one at hand, or fitted to the log of a step; and the files that plans read them from.

Measured ones replace the rates in the table of devices: matmuls, fused attention, memory, launches, the bus to the
node's CPU memory, and all-gathers where several ranks run. Attention is causal, with the FLOPs of the
half that its kernels compute, as the planner counts them.
"""

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.benchmark import Timer

from nemo_like._util.json_file import write_json
from nemo_like.distributed.launch import current_device, local_world_size, pick_device_type, rank, world_size
from nemo_like.planning.devices import Device, attention_shares, device_at_hand, device_entry, rates_file
from nemo_like.planning.predictions.seconds import step_seconds
from nemo_like.planning.query import Choices, PlanQuery
from nemo_like.planning.roofline import RATED_INNER, wave_share

SECONDS = 3.0  # Most seconds of one measurement, of which there are at most ten.


def calibrate(seconds: float | None = None) -> Path:
    """Measure the device at hand, in less than a minute, write its rates to its file, and return the path.

    Where a process group is up, all ranks call this; all-gathers are measured, too, and rank 0 writes.

    Args:
        seconds: most seconds of one measurement (default: `SECONDS`).

    Raises:
        OSError: the file cannot be written.
    """
    at_hand = device_at_hand()
    path = rates_file(at_hand)
    if path is None:
        raise ValueError("NEMO_LIKE_CACHE is 'off', so measured rates are not kept. Set it to a folder, or unset it.")
    seconds = SECONDS if seconds is None else seconds
    kind = pick_device_type()
    device = current_device(kind)
    large = (64 << 20) if kind == "cpu" else (1 << 30)
    rates = {
        "matmul_half": _matmul(device, torch.bfloat16, seconds),
        "matmul_single": _matmul(device, torch.float32, seconds),
        "attention_half": _attention(device, torch.bfloat16, seconds),
        "attention_single": _attention(device, torch.float32, seconds),
        # Read and written; no cache holds so much.
        "bandwidth": 2.0 * _copy(torch.zeros(large, dtype=torch.uint8, device=device), device, seconds),
        "launch_seconds": _seconds(partial(torch.zeros(8, device=device).add_, 1.0), 1.0),
    }
    if kind == "cuda":
        rates["host_link"] = _copy(torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True), device, seconds)
    if dist.is_initialized() and world_size() > 1:
        rates["nvlink" if local_world_size() == world_size() else "network"] = _gather(device)
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


def _timer(run: Callable[[], Any]) -> Timer:
    return Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())


def _seconds(run: Callable[[], Any], most: float) -> float:
    """Return the median over runs, which torch's timer makes for so many seconds, some of them without a wait between."""
    return _timer(run).blocked_autorange(min_run_time=most / 2).median


def _matmul(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Return the FLOP/s of a product of normal values with the inner dimension that the rates of the table have: on a GPU
    8,192 tokens in whole waves of tiles (`nemo_like.planning.roofline.product_seconds`)."""
    tokens, width, inner = 512, 256, 256
    if device.type != "cpu":
        tokens, width, inner = 8192, 4096, RATED_INNER
    left = torch.randn(tokens, inner, device=device, dtype=dtype)
    right = torch.randn(width, inner, device=device, dtype=dtype)
    flops = 2.0 * tokens * width * inner / wave_share([(tokens, width)], device_at_hand().processors)
    return flops / _seconds(partial(F.linear, left, right), seconds)


@torch.no_grad()
def _attention(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Return the FLOP/s of causal attention: four heads of 64 on 1,024 tokens, on a GPU 16 of 128 on 8,192."""
    heads, tokens, width = (4, 1024, 64) if device.type == "cpu" else (16, 8192, 128)
    query, key, value = torch.randn(3, 1, heads, tokens, width, device=device, dtype=dtype)
    taken = _seconds(partial(F.scaled_dot_product_attention, query, key, value, is_causal=True), seconds)
    return 2.0 * heads * tokens**2 * width / taken


def _copy(source: torch.Tensor, device: torch.device, seconds: float) -> float:
    """Return the bytes per second that are copied to `device`."""
    target = torch.empty_like(source, device=device)
    return source.numel() / _seconds(lambda: target.copy_(source, non_blocking=True), seconds)


def _gather(device: torch.device) -> float:
    """Return the bytes per second that a rank receives in an all-gather. A collective: as many runs on each rank."""
    part = torch.zeros((4 << 20) if device.type == "cpu" else (64 << 20), dtype=torch.uint8, device=device)
    whole = torch.empty(part.numel() * world_size(), dtype=torch.uint8, device=device)
    taken = _timer(partial(dist.all_gather_single, whole, part)).timeit(5).mean
    return part.numel() * (world_size() - 1) / taken


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

    def predicted(factor: float) -> float:
        other = query.under(query.job.change(gpu=at_factor(query.device, factor)))
        return step_seconds(other, choices).total

    slow, fast = 1 / MOST, MOST
    if not predicted(fast) <= seconds <= predicted(slow):
        raise ValueError(
            f"A step took {seconds:.4g} s, and {predicted(1.0):.4g} s are predicted; no rates within {MOST:g} times "
            "those of the table explain that. Check the flags: the log must be of this job, on this GPU."
        )
    for _ in range(12):  # to one part in a thousand
        factor = math.sqrt(slow * fast)
        slow, fast = (factor, fast) if predicted(factor) > seconds else (slow, factor)
    return math.sqrt(slow * fast)


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
    name, known = device_entry(spec)
    rates = ("matmul", "matmul_fp8", "bandwidth")
    entry = known | {rate: known[rate] * factor for rate in rates if rate in known}
    kernels, _ = attention_shares(entry["attention"], name)
    entry["attention"] = {kernel: [share * factor for share in shares] for kernel, shares in kernels.items()}
    entry["sources"] = entry.get("sources", {}) | {"measured": words}
    entry.pop("match", None)
    write_json(Path(path), entry)
