"""The schedules of a pipeline: one object each, with all that anybody asks of one. To add a schedule, add an object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _no_check(ranks: int, microbatches: int) -> str | None:
    return None


def _equal_rounds(ranks: int, microbatches: int) -> str | None:
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        return f"it goes {rounds} rounds of equal length: use {rounds * ranks} or {(rounds + 1) * ranks}."
    return None


def _one_for_each_rank(ranks: int, microbatches: int) -> str | None:
    if microbatches < ranks:
        return (
            f"with fewer microbatches than stages, stages stand idle all along: use at least {ranks}, or a smaller pp."
        )
    return None


def _one_for_each_stage_of_two(ranks: int, microbatches: int) -> str | None:
    return f"it takes at least as many as there are stages: use {2 * ranks}." if microbatches < 2 * ranks else None


def _all(ranks: int, microbatches: int, per_rank: int) -> float:
    return microbatches


def _one_a_rank(ranks: int, microbatches: int, per_rank: int) -> float:
    return min(microbatches, ranks) / per_rank


def _interleaved(ranks: int, microbatches: int, per_rank: int) -> float:
    return min(per_rank * microbatches, (per_rank + 1) * ranks - 1) / per_rank


@dataclass(frozen=True)
class Schedule:
    """What is known of a schedule of `torch.distributed.pipelining` (or of a file's table)."""

    name: str
    torch_class: str | None
    """Its class in `torch.distributed.pipelining`; None: a file's."""
    stages_per_rank: tuple[int, ...] = ()
    """How many stages a rank may hold, the default first; empty: any number, two where nobody says."""
    v_shaped: bool = False
    """Two stages on a rank, the second half in the opposite order: the first and the last stage share a rank."""
    splits_backward: bool = False
    """Gradients of inputs (dI) first, of weights (dW) later."""
    check: Callable[[int, int], str | None] = _no_check
    """(ranks, microbatches): why it cannot run so many, and the way out; None: it can."""
    in_flight: Callable[[int, int, int], float] = _one_a_rank
    """(ranks, microbatches, stages per rank): at least so many microbatches the first rank has gone forward with and not
    back, in shares of its layers."""
    fill: float = 0.0
    """At least this share of a forward and backward through the other ranks is waited for at the ends of a step."""
    repeats_after: Callable[[int], int] | None = None
    """(ranks): the microbatch from which on memory repeats itself; None: not known."""
    frees_sent: bool = False
    """The output of a stage is freed when it was sent; else when the step ends."""
    is_searched: bool = False
    """`nemo_like.planning.fit` looks at it where nobody pins a schedule."""

    @property
    def default_per_rank(self) -> int:
        """Stages on a rank where nobody says."""
        return (*self.stages_per_rank, 2)[0]

    @property
    def several(self) -> bool:
        """Whether a rank holds more than one stage."""
        return self.stages_per_rank != (1,)


SCHEDULE_OBJECTS: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", "ScheduleGPipe", (1,), in_flight=_all, fill=1.0),
        Schedule(
            "1f1b",
            "Schedule1F1B",
            (1,),
            check=_one_for_each_rank,
            fill=1.0,
            frees_sent=True,
            is_searched=True,
            repeats_after=lambda ranks: 2 * ranks + 2,
        ),
        Schedule(
            "interleaved_1f1b",
            "ScheduleInterleaved1F1B",
            check=_equal_rounds,
            in_flight=_interleaved,
            fill=0.5,
            is_searched=True,
        ),
        Schedule("interleaved_zero_bubble", "ScheduleInterleavedZeroBubble", check=_equal_rounds, splits_backward=True),
        Schedule("zbv", "ScheduleZBVZeroBubble", (2,), v_shaped=True, splits_backward=True, is_searched=True),
        Schedule(
            "dualpipev",
            "ScheduleDualPipeV",
            (2,),
            v_shaped=True,
            splits_backward=True,
            check=_one_for_each_stage_of_two,
        ),
    )
}
SCHEDULES: tuple[str, ...] = tuple(SCHEDULE_OBJECTS)
