"""The schedules of `torch.distributed.pipelining`: which rank holds which stages, and torch's own object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import pipelining

from nemo_like.options import PipelineParallel
from nemo_like.torch_compat import schedule_from_file


def stages_of(options: PipelineParallel, rank: int) -> list[int]:
    """Numbers of the stages that rank `rank` of the pipeline holds.

    >>> stages_of(PipelineParallel(2, schedule="zbv"), 0), stages_of(PipelineParallel(2, schedule="interleaved_1f1b"), 1)
    ([0, 3], [1, 3])
    """
    if (table := options.file) is not None:
        return table.of_rank(rank)
    if options.facts.v_shaped:
        return [rank, 2 * options.size - 1 - rank]
    return list(range(rank, options.stages, options.size))


def rank_of(options: PipelineParallel, stage: int) -> int:
    """The rank of the pipeline that holds `stage`."""
    return next(rank for rank in range(options.size) if stage in stages_of(options, rank))


def make_schedule(options: PipelineParallel, stages: Sequence[Any], loss_fn: Callable[..., Any]) -> Any:
    """torch's schedule for the stages of this rank. Gradients are not scaled: the losses are weighted."""
    facts = options.facts
    given = list(stages) if facts.several else stages[0]
    rest: dict[str, Any] = {"loss_fn": loss_fn, "scale_grads": False}
    if facts.torch_class is None:
        assert options.microbatches is not None  # the file says how many
        return schedule_from_file(options.schedule, given, options.microbatches, **rest)
    return getattr(pipelining, facts.torch_class)(given, options.microbatches, **rest)
