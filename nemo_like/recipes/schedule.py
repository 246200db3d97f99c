"""The learning rate as a pure function of the step, so that no schedule state has to be saved."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up from 0 to `peak`, then down to ``floor * peak`` by the last step.

    >>> schedule = Schedule("linear", peak=1.0, warmup=2, steps=4, floor=0.5)
    >>> [schedule.at(step) for step in range(4)]
    [0.5, 1.0, 0.75, 0.5]
    """

    kind: str
    """``cosine`` (half a period) | ``linear`` | ``constant`` (stays at `peak`)."""
    peak: float
    """Learning rate at the end of the warm-up."""
    warmup: int
    """Steps of warm-up; the first of them already moves the weights."""
    steps: int
    """Steps of the whole run."""
    floor: float = 0.1
    """What is left at the last step, as a share of `peak`."""

    def at(self, step: int) -> float:
        """The learning rate of the step numbered `step`, from 0; steps past the last one stay at the floor."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup + 1) / max(1, self.steps - self.warmup))
        shape = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.peak * (self.floor + (1 - self.floor) * shape)
