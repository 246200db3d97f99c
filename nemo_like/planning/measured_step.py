"""A measured step of a job: read from its log, and a file of its GPU at the rates with which that step is predicted."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nemo_like._util.json_file import write_json
from nemo_like.planning.devices import Device, entry_of
from nemo_like.planning.predictions.seconds import step_seconds
from nemo_like.planning.query import Choices, PlanQuery

MOST = 4.0
"""Largest factor of rates; its inverse is the least."""
_NUMBER = r"([\d.,]+)\s*([KM]?)"
_LOGS: Mapping[str, tuple[str, str]] = {
    "torchtitan": (rf"\bstep:\s*\d+\b.*\btps:\s*{_NUMBER}", "tokens"),
    "KempnerForge": (rf"\bstep_time={_NUMBER}s?", "seconds"),
    "nanotron": (rf"\belapsed_time_per_iteration_ms:\s*{_NUMBER}", "milliseconds"),
    "litgpt": (rf"\biter time:\s*{_NUMBER}\s*ms", "milliseconds"),
}
"""By program, what its log has of a step, and the unit: ``tokens`` are those of one GPU in a second."""
READ = f"1.83s, 950ms or 6120tok/s (of one GPU); log.jsonl of nemo-like; a log of {', '.join(_LOGS)}"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Speed(NamedTuple):
    """Speed of a step as it was measured."""

    value: float
    unit: str
    """``seconds``, ``milliseconds``, ``tokens`` (of one GPU in a second), or ``all tokens`` (of all GPUs)."""

    def seconds(self, tokens: int | None, query: PlanQuery) -> float:
        """Return the seconds of a step of `query`; `tokens`: of one micro-batch of one rank.

        Raises:
            ValueError: it is given in tokens, and the model takes none.
        """
        if "tokens" not in self.unit:
            return self.value / (1000 if self.unit == "milliseconds" else 1)
        if not tokens:
            raise ValueError("The log has tokens per second, and this model takes no text. Give seconds: 1.83s.")
        job = query.job
        of_one = tokens * query.microbatches / (job.tp.size * job.cp.size * job.pp.size)
        return of_one / self.value * (job.ranks if self.unit == "all tokens" else 1)


def read_speed(log: str) -> Speed:
    """Return the speed that a log states: a number with a unit, or the median of a file's steps but for the first two.

    Raises:
        ValueError: it is neither, or no speed of a step is in the file.
    """
    if given := re.fullmatch(rf"\s*{_NUMBER}\s*(ms|s|tok/s)\s*", log):
        return Speed(_number(given), {"ms": "milliseconds", "s": "seconds", "tok/s": "tokens"}[given[3]])
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
    patterns = [*_LOGS.values(), (rf'"tokens_per_second": {_NUMBER}', "all tokens")]
    found = [([_number(line) for line in re.finditer(pattern, text)], unit) for pattern, unit in patterns]
    values, unit = max(found, key=lambda each: len(each[0]))
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
    entry: dict[str, Any] = json.loads(json.dumps(entry_of(spec)))
    entry |= {
        name: entry[name] * factor for name in ("matmul", "matmul_fp8", "attention", "bandwidth") if name in entry
    }
    entry["sources"] = entry.get("sources", {}) | {"measured": words}
    entry.pop("match", None)
    write_json(Path(path), entry)
