"""The schedules of `torch.distributed.pipelining`: which rank holds which stages, and torch's own object."""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from nemo_like.options import PipelineParallel


def stages_of(options: PipelineParallel, rank: int) -> list[int]:
    """Numbers of the stages that rank `rank` of the pipeline holds.

    >>> stages_of(PipelineParallel(2, schedule="zbv"), 0), stages_of(PipelineParallel(2, schedule="interleaved_1f1b"), 1)
    ([0, 3], [1, 3])
    """
    if options.facts.v_shaped:
        return [rank, 2 * options.size - 1 - rank]
    return list(range(rank, options.stages, options.size))


def rank_of(options: PipelineParallel, stage: int) -> int:
    """The rank of the pipeline that holds `stage`."""
    return next(rank for rank in range(options.size) if stage in stages_of(options, rank))


def make_schedule(options: PipelineParallel, stages: Sequence[Any], loss_fn: Callable[..., Any]) -> Any:
    """torch's schedule for the stages of this rank. Gradients are not scaled: the losses are weighted."""
    schedule: Any = getattr(importlib.import_module("torch.distributed.pipelining"), options.facts.torch_class)
    stages_here = list(stages) if options.facts.several else stages[0]
    return schedule(stages_here, options.microbatches, loss_fn=loss_fn, scale_grads=False)


# The actions of each rank of a pipeline, in order: read from torch's own schedules, without a process group.

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"  # Forward; backward in one piece; its two halves.
COMPUTED = (FORWARD, BACKWARD, INPUTS, WEIGHTS)
# Actions of FSDP2 for a whole stage: its parameters are gathered, freed; its gradients reduced.
UNSHARD, RESHARD, REDUCE = "UNSHARD", "RESHARD", "REDUCE_GRAD"


@dataclass(frozen=True)
class Action:
    """One rank runs one stage for one micro-batch."""

    kind: str
    stage: int
    microbatch: int  # -1: all of them.

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"


def actions_of(pp: PipelineParallel) -> list[tuple[Action, ...]]:
    """Return the computations of each rank of a pipeline in a step, in order.

    >>> [" ".join(map(str, rank)) for rank in actions_of(PipelineParallel(2, microbatches=3))]
    ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']
    """
    return [tuple(action for action in rank if action.kind in COMPUTED) for rank in all_actions_of(pp)]


@functools.lru_cache(maxsize=32)  # a search uses the same ones again and again
def all_actions_of(pp: PipelineParallel, *, repeats: bool = True) -> tuple[tuple[Action, ...], ...]:
    """Return the same with FSDP2's actions for whole stages.

    repeats: False: of one stage on a rank, without the micro-batches in which its memory repeats itself.

    >>> print(*all_actions_of(PipelineParallel(2, microbatches=2))[0])
    0F0 0F1 0B0 0B1 0REDUCE_GRAD
    """
    count, after = pp.microbatches or 1, pp.facts.repeats_after
    if not pp.facts.several:
        enough = [count if repeats or after is None else min(count, after(pp.size - rank)) for rank in range(pp.size)]
        ahead = [int(pp.facts.in_flight(pp.size - rank, most, 1)) for rank, most in enumerate(enough)]
        return tuple(tuple(_one_stage(rank, *each)) for rank, each in enumerate(zip(enough, ahead)))
    schedule = make_schedule(pp, [_shape(pp, stage) for stage in stages_of(pp, 0)], lambda output, target: output)
    return tuple(tuple(_flat(schedule.pipeline_order_with_comms[rank])) for rank in range(pp.size))


def _one_stage(rank: int, count: int, ahead: int) -> Iterator[Action]:
    """GPipe and 1F1B, which torch has as loops and not as tables; `ahead`: forwards before the first backward."""
    done = 0
    for number in range(count):
        if number >= ahead:
            yield Action(BACKWARD, rank, done)
            done += 1
        yield Action(FORWARD, rank, number)
    for number in range(done, count):
        yield Action(BACKWARD, rank, number)
    yield Action(REDUCE, rank, -1)


def _shape(pp: PipelineParallel, stage: int) -> Any:
    """As much of a stage as a schedule looks at to make its table."""
    return SimpleNamespace(
        num_stages=pp.stages,
        group_size=pp.size,
        group_rank=0,
        stage_index=stage,
        is_first=stage == 0,
        is_last=stage == pp.stages - 1,
        has_backward=True,
        group=None,
        submod=None,
    )


def _flat(actions: Any) -> Iterator[Action]:
    """Without sending and receiving; a forward and a backward that overlap, one after the other."""
    for action in actions:
        kind = action.computation_type.value
        if action.sub_actions:
            yield from _flat(action.sub_actions)
        elif kind in COMPUTED:
            yield Action(kind, action.stage_index, action.microbatch_index)
        elif kind in (UNSHARD, RESHARD, REDUCE):
            yield Action(kind, action.stage_index, -1)
