"""The schedules of `torch.distributed.pipelining`: by what names, for how many stages, which rank holds which."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import pipelining

from nemo_like.options import PipelineParallel
from nemo_like.torch_compat import schedule_from_file


@dataclass(frozen=True)
class ScheduleKind:
    """What torch's schedule of a name asks for."""

    make: Callable[..., Any]
    several: bool
    """More than one stage on a rank."""
    v_shaped: bool = False
    """Two stages on a rank, the second half in the opposite order: the first and the last stage share a rank."""
    splits_backward: bool = False
    """Gradients of inputs first, of weights later."""


KINDS: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(pipelining.ScheduleGPipe, several=False),
    "1f1b": ScheduleKind(pipelining.Schedule1F1B, several=False),
    "interleaved_1f1b": ScheduleKind(pipelining.ScheduleInterleaved1F1B, several=True),
    "interleaved_zero_bubble": ScheduleKind(
        pipelining.ScheduleInterleavedZeroBubble, several=True, splits_backward=True
    ),
    "zbv": ScheduleKind(pipelining.ScheduleZBVZeroBubble, several=True, v_shaped=True, splits_backward=True),
    "dualpipev": ScheduleKind(pipelining.ScheduleDualPipeV, several=True, v_shaped=True, splits_backward=True),
}


def kind_of(options: PipelineParallel) -> ScheduleKind:
    """What `options.schedule` is, a file's included."""
    if (table := options.file) is None:
        return KINDS[options.schedule]
    make = functools.partial(schedule_from_file, options.schedule)
    return ScheduleKind(make, several=True, splits_backward=table.splits_backward)


def stages_of(options: PipelineParallel, rank: int) -> list[int]:
    """Numbers of the stages that rank `rank` of the pipeline holds.

    >>> stages_of(PipelineParallel(2, schedule="zbv"), 0), stages_of(PipelineParallel(2, schedule="interleaved_1f1b"), 1)
    ([0, 3], [1, 3])
    """
    if (table := options.file) is not None:
        return table.of_rank(rank)
    if KINDS[options.schedule].v_shaped:
        return [rank, 2 * options.size - 1 - rank]
    return list(range(rank, options.stages, options.size))


def rank_of(options: PipelineParallel, stage: int) -> int:
    """The rank of the pipeline that holds `stage`."""
    return next(rank for rank in range(options.size) if stage in stages_of(options, rank))


def make_schedule(options: PipelineParallel, stages: Sequence[Any], loss_fn: Callable[..., Any]) -> Any:
    """torch's schedule for the stages of this rank. Gradients are not scaled: the losses are weighted."""
    kind = kind_of(options)
    given = list(stages) if kind.several else stages[0]
    return kind.make(given, options.microbatches, loss_fn=loss_fn, scale_grads=False)
