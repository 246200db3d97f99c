"""Changes that nothing was searched for and that make the winner faster: a compiler, and AdamW as one kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nemo_like._util.table import ByteUnit, three_digits
from nemo_like.job import Job
from nemo_like.planning.fit.candidate import Candidate
from nemo_like.planning.fit.layouts import Configuration
from nemo_like.planning.fit.question import Question
from nemo_like.planning.fit.search import Search
from nemo_like.planning.fit.shapes import Shape, ShapeKey

LEAST_GAIN = 0.01
"""Share of the winner's speed that a change must gain to be named."""
_COMPILE, _FUSED = {"compile": "inductor"}, {"optimizer": "adamw-fused"}


@dataclass(frozen=True)
class Faster:
    """The winner with changes of the job that the caller left open and that no search looks at."""

    changed: tuple[tuple[str, str], ...]
    """Changed keywords of `nemo_like.fit` and their values."""
    candidate: Candidate
    """The winner with them: it fits, too."""
    gain: float
    """Tokens per second that it gains, as a share of the winner's."""

    @property
    def flags(self) -> str:
        """The changes as flags of the command."""
        return " ".join(f"--{name} {value}" for name, value in self.changed)

    def words(self) -> str:
        """Return the change, its speed and its bytes in a line."""
        need = self.candidate.need.bytes
        return (
            f"{self.flags}: {three_digits(self.candidate.tokens_per_second_per_gpu)} tokens/s/GPU "
            f"(+{100 * self.gain:.0f} %), {ByteUnit.of([need]).word(need)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it in JSON values; sizes in bytes, times in seconds."""
        return {
            "changed": dict(self.changed),
            "gain": self.gain,
            "tokens_per_second_per_gpu": self.candidate.tokens_per_second_per_gpu,
            "step_seconds": self.candidate.step_seconds,
            "peak_bytes": self.candidate.peak_bytes,
            "needed_bytes": self.candidate.need.bytes,
            "judged_by": self.candidate.need.by,
            "ac": self.candidate.ac,
        }


def faster_than(
    best: Candidate, search: Search, remade: Callable[[ShapeKey, Question], Shape], left_open: tuple[str, ...]
) -> tuple[Faster, ...]:
    """Return the changes that gain enough beside the winner and fit: each alone, then both.

    Both are named where they gain enough beyond the better one alone. Nothing is predicted once the time of the search is
    over. A plan is made anew for another optimizer only where its own step is faster.

    Args:
        best: the winner of `search`, on a CUDA device.
        remade: makes a shape for another question; raises ValueError where there is none.
        left_open: ``compile`` and ``optimizer``, as far as the caller left them open.
    """
    tried: list[dict[str, str]] = [change for change in (_COMPILE, _FUSED) if set(change) <= set(left_open)]
    key, known = ShapeKey.of(best.conf), dict[str | None, Shape]()
    if isinstance(traced := search.shapes.get(key), Shape):
        known[None] = traced
    found, most = list[Faster](), 0.0
    for change in tried + [_COMPILE | _FUSED] * (len(tried) == 2):
        if len(change) == 2 and len(found) < 2:
            break  # one of them gains nothing, or does not fit
        if time.monotonic() > search.until:
            break
        try:
            question = replace(search.question, job=_changed(search.question.job, change))
            shape = known.get(change.get("compile")) or remade(key, question)
            known[change.get("compile")] = shape
            conf = replace(best.conf, job=_changed(best.job, change))
            if best.plan is not None and "compile" not in change and not _updates_faster(shape, best.conf, conf):
                continue
            candidate = search.predicted(shape, conf)
        except (ValueError, NotImplementedError):
            continue  # a rule of the job, a part that is not planned
        if candidate is None:
            continue
        gain = candidate.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu - 1
        if gain >= LEAST_GAIN + (most if len(change) == 2 else 0.0):
            found.append(Faster(tuple(change.items()), candidate, gain))
            most = max(most, gain)
    return tuple(found)


def _updates_faster(shape: Shape, before: Configuration, after: Configuration) -> bool:
    """Return whether the optimizer of `after` makes a step shorter whose layers run alike."""
    seconds = [
        shape.seconds(conf, shape.choices(conf)).total for conf in (before.change(ac="full"), after.change(ac="full"))
    ]
    return seconds[1] < seconds[0]


def _changed(job: Job, change: dict[str, str]) -> Job:
    optimizer = change.get("optimizer", job.step.optimizer)
    return replace(job, compile=change.get("compile", job.compile), step=replace(job.step, optimizer=optimizer))
