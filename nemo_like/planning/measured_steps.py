"""Measured steps of jobs: read from logs, kept in the rates file of their device, and fitted by two factors of its rates."""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nemo_like._util.json_file import write_json
from nemo_like._util.log import warn_once
from nemo_like.planning.answers.seconds import step_seconds
from nemo_like.planning.devices import at_factors, calibrated, factors_of, rates_file
from nemo_like.planning.model.quantised import of_layers
from nemo_like.planning.query import Choices, PlanQuery, Stage

MOST = 4.0
"""Largest factor, and largest quotient of predicted and measured seconds; the least of both is its inverse."""
READ = (
    "Read are: 1.83s, 950ms or 6120tok/s; log.jsonl of nemo-like; the console log of torchtitan (tps: 6,120); log lines or "
    "trainer_state.json of the Hugging Face Trainer (train_runtime)"
)
_UNIT = re.compile(r"\s*(\d[\d,]*\.?\d*|\.\d+)\s*(ms|s|tok/s)\s*")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TORCHTITAN = re.compile(r"\bstep:\s*(\d+)\b.*\btps:\s*([\d,]+(?:\.\d+)?)")

Unit = Literal["seconds", "per GPU", "of all"]


class Speed(NamedTuple):
    """Speed of a step, as a log states it: seconds, or tokens per second of one GPU or of all."""

    value: float
    unit: Unit

    def seconds(self, tokens: int | None, query: PlanQuery) -> float:
        """Return the seconds of a step of `query`; `tokens`: of one micro-batch of one rank, None where it takes no text.

        Raises:
            ValueError: the log has tokens per second, and the input has none.
        """
        if self.unit == "seconds":
            return self.value
        if tokens is None:
            raise ValueError("The log has tokens per second, and this model takes no text. Give seconds: 1.83s.")
        job = query.job
        each = tokens * query.microbatches / (job.tp.size * job.cp.size * job.pp.size)
        return each / self.value * (job.ranks if self.unit == "of all" else 1)


def read_speed(log: str) -> Speed:
    """Return the speed that `log` states: a number with a unit, or a file.

    Raises:
        ValueError: it is neither, or no speed is in the file.
    """
    if given := _UNIT.fullmatch(log):
        value = float(given[1].replace(",", "")) / (1000 if given[2] == "ms" else 1)
        speed = Speed(value, "per GPU" if given[2] == "tok/s" else "seconds")
    elif Path(log).is_file():
        speed = _speed_of(log, _COLOUR.sub("", Path(log).read_text(encoding="utf-8", errors="replace")))
    else:
        raise ValueError(f"--calibrate-from is {log!r}, which is neither a number with a unit nor a file. {READ}.")
    if not 0.0 < speed.value < math.inf:
        raise ValueError(f"--calibrate-from {log} states {speed.value:g}; a speed must be a positive number.")
    return speed


def _speed_of(path: str, text: str) -> Speed:
    if whole := list(_of_trainer(text)):
        return whole[-1]
    unit: Unit = "per GPU"
    steps = [(int(line[1]), float(line[2].replace(",", ""))) for line in _TORCHTITAN.finditer(text)]
    if not steps:  # log.jsonl
        found = (record for record in _records(text) if record.get("tokens_per_second") and "step" in record)
        unit, steps = "of all", [(int(each["step"]), float(each["tokens_per_second"])) for each in found]
    numbers = sorted({number for number, _ in steps})
    if len(numbers) == 1:
        raise ValueError(f"{path} has one step only, and the first is slow. Give the log of four steps or more.")
    late = numbers[2 if len(numbers) >= 4 else 1 :]
    values = [value for number, value in steps if number in late]
    if not values:
        raise ValueError(f"{path} has no speed of a step. {READ}.")
    return Speed(statistics.median(values), unit)


def _of_trainer(text: str) -> Iterator[Speed]:
    """Yield the speeds in the summaries of runs of the Hugging Face Trainer; they are means over all steps."""
    for record in _records(text):
        runtime, steps = record.get("train_runtime"), record.get("step", record.get("global_step"))
        if runtime and steps:
            yield Speed(float(runtime) / int(steps), "seconds")
        elif record.get("train_steps_per_second"):
            yield Speed(1.0 / float(record["train_steps_per_second"]), "seconds")
        elif record.get("train_tokens_per_second"):
            yield Speed(float(record["train_tokens_per_second"]), "of all")


def _records(text: str) -> Iterator[dict[str, Any]]:
    """Yield the dicts of a file: its ``log_history`` where it is one of JSON, else those that lines end with."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        yield from [record for record in json.loads(text)["log_history"] if isinstance(record, dict)]
        return
    for line in text.splitlines():
        part = line[line.find("{") : line.rfind("}") + 1]
        for read in (json.loads, ast.literal_eval) if part else ():
            with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError):
                if isinstance(record := read(part), dict):
                    yield record
                    break


@dataclass(frozen=True)
class MeasuredStep:
    """A traced job with the seconds that a step of it took."""

    words: Sequence[str]
    """Its command line, by which it is traced again."""
    seconds: float
    query: PlanQuery
    """The job on its device without factors."""
    choices: Choices

    def predicted(self, computing: float = 1.0, sending: float = 1.0) -> float:
        """Return the seconds of a step where the device's rates are multiplied by these factors."""
        query = self.query if computing == sending == 1.0 else _at(self.query, computing, sending)
        return step_seconds(query, self.choices).total


def _at(query: PlanQuery, computing: float, sending: float) -> PlanQuery:
    """Return `query` on its device at other rates; nothing is traced again."""
    device, stages = at_factors(query.device, computing, sending), list[Stage]()
    for stage in query.stages:
        stage.outside()  # remembered from here on, with its seconds
        part = copy.copy(stage.part)
        part.__dict__.pop("blocks", None)
        part.device = device
        part.problems = [replace(each, device=of_layers(device, stage.job)) for each in part.problems]
        # Seconds outside the layers count no launches, so they go with the rates that `computing` multiplies.
        outside = {key: replace(each, seconds=each.seconds / computing) for key, each in part.known.outside.items()}
        part.known = copy.copy(part.known)
        part.known.outside = outside
        stages.append(Stage(part, stage.job, stage.slice, stage.names))
    return replace(query, stages=tuple(stages))


def fit_factors(steps: Sequence[MeasuredStep]) -> dict[str, float]:
    """Return the factors of ``computing``, and of ``sending`` where several steps tell both apart, that fit `steps` best.

    Sums the squares of log(predicted / measured) on a grid around the best point, which becomes finer.
    """
    both = len(steps) > 1 and any(step.query.job.ranks > 1 for step in steps)
    known = dict[tuple[float, float], float]()

    def error(point: tuple[float, float]) -> float:
        if point not in known:
            far = sum(x * x for x in point)  # of equal errors, the factors nearest to one
            errors = (math.log(step.predicted(*map(math.exp, point)) / step.seconds) for step in steps)
            known[point] = 1e-7 * far + sum(each**2 for each in errors)
        return known[point]

    end, best, width, reach = math.log(MOST), (0.0, 0.0), math.log(MOST) / 4, 4
    while width > 2e-4:
        turns = [width * turn for turn in range(-reach, reach + 1)]
        points = [(best[0] + x, best[1] + y) for x in turns for y in (turns if both else [0.0])]
        found = min((p for p in points if max(map(abs, p)) <= end + 1e-9), key=error)
        width = width / 2 if found == best else width
        best, reach = found, 1
    return {name: math.exp(value) for name, value in zip(("computing", "sending")[: 1 + both], best)}


def add_step(step: MeasuredStep, traced: Callable[[Sequence[str], float], MeasuredStep]) -> str:
    """Add `step` to the rates file of its device, fit the factors to all steps in it, and return a line on both.

    Args:
        step: the new one; a step of the same job in the file is replaced.
        traced: traces a job of the file again, by its command line.

    Raises:
        ValueError: the measured seconds are too far from the predicted ones; the file is as it was.
    """
    base, path = step.query.device, rates_file(step.query.device)
    plain = step.predicted()
    if not 1 / MOST <= plain / step.seconds <= MOST:
        raise ValueError(
            f"The log has {step.seconds:.4g} s a step, and {plain:.4g} s are predicted: more than {MOST:g}x apart. "
            "Nothing was written. Check the flags: the log must be of this job, on this GPU."
        )
    said: dict[str, Any] = {"device": base.name}
    if path.exists() and calibrated(base).rates != "the table":  # else it is damaged, which that warned of
        said = json.loads(path.read_text(encoding="utf-8"))
    old = factors_of(said)
    kept = [each for each in said.get("steps", []) if each["job"] != list(step.words)]
    steps = [step]
    for each in kept:
        try:
            steps.append(traced(each["job"], each["seconds"]))
        except (ValueError, ImportError, OSError, NotImplementedError) as error:
            warn_once(f"{path} has a step that cannot be predicted any more ({error}): it is not fitted.")
    factors = fit_factors(steps)
    said["steps"] = [*kept, {"job": list(step.words), "seconds": step.seconds}]
    said["factors"] = factors | {"steps": len(steps), "date": time.strftime("%Y-%m-%d", time.gmtime())}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, said)
    words = " and ".join(f"{name} at {factor:.2f}" for name, factor in factors.items())
    far = " and ".join(name for name, factor in factors.items() if not 1.001 < MOST * factor < MOST**2 / 1.001)
    return (
        f"Measured {step.seconds:.4g} s a step; predicted {step.predicted(*old):.4g} s before and "
        f"{step.predicted(*factors.values()):.4g} s after calibration: {words} of the rates, by {len(steps)} "
        f"measured step{'s' * (len(steps) > 1)} ({path})."
        + (f" At its limit is {far}: check the flags of each step in that file." if far else "")
    )
