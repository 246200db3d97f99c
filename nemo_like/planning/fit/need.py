"""What decides whether a configuration fits: what CUDA's caching allocator reserves, where that is predicted.

Users run out of what is reserved, not of what tensors take. A step fits where the allocator, replayed with no more memory
than the limit, goes through without giving segments back in every step, for which the device would have to wait. Where
nothing reserves more than tensors take (the CPU), these decide. And where there is an allocator but no prediction of it
(what waits in host memory, pipelines whose schedule cuts backward in two), it is taken to reserve `OVERHEAD` more than
tensors take. Of a pipeline, the rank that reserves most decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nemo_like.planning.allocator_model import DeviceMemoryError
from nemo_like.planning.block import Choice
from nemo_like.planning.fit.layouts import Configuration
from nemo_like.planning.fit.question import Question
from nemo_like.planning.peak import Peak
from nemo_like.planning.planner import Planner
from nemo_like.planning.reserved import Reserved, replay
from nemo_like.planning.stage_reserved import is_replayed, ranks_to_replay, replay_rank
from nemo_like.planning.stages import Choices, PipelinePlanner
from nemo_like.tensors import tensors_in

OVERHEAD = 0.21
"""Of what tensors take, the share that is reserved beyond it where that is not predicted: about the most that our model of
the allocator gives for the steps of docs/benchmarks/published.md (9 to 22 %)."""
RESERVED, ALLOCATED, WITH_OVERHEAD = "reserved", "allocated", f"allocated + {OVERHEAD:.0%}"


@dataclass(frozen=True)
class Need:
    """Bytes that one rank must have."""

    bytes: int
    by: str
    """What they are: `RESERVED`, `ALLOCATED`, or `WITH_OVERHEAD`."""
    reserved: int | None = None
    """What the caching allocator reserves at most; None: not known."""
    inputs: int = 0
    """Of `bytes`, the step's input (token ids and labels), which peaks and what is reserved for them leave out."""


def need_of(question: Question, peak: Peak, reserved: int | None, inputs: int) -> Need:
    """Of a step with that peak; `reserved`: see `reserved_within`. `inputs`: bytes of what the model is called with."""
    if question.device.cuda is None:
        return Need(peak.total + inputs, ALLOCATED, inputs=inputs)
    if reserved is None:
        return Need(int(peak.total * (1 + OVERHEAD)) + inputs, WITH_OVERHEAD, inputs=inputs)
    return Need(reserved + inputs, RESERVED, reserved, inputs)


def input_bytes(sample: Any, rows: int, conf: Configuration) -> int:
    """Of the step's input on one rank, as it is before sequences are cut: of one microbatch, or of all that a pipeline's
    step is called with. `sample`: of `rows` sequences."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(sample))
    return size * conf.micro_batch // rows * (conf.grad_accum if conf.pp > 1 else 1)


def reserved_within(planner: Planner, choices: Sequence[Choice], limit: int) -> int | None:
    """Bytes that are reserved on a device with `limit`, or, where it does not have them, those that would be on a larger
    one; None: not predicted."""
    found = planner.reserved(choices)
    if found is None:
        return None
    return _within(found, limit, lambda: replay(planner, choices, planner.job.allocator, limit))


def reserved_by_ranks(planner: PipelinePlanner, choices: Choices, limit: int) -> int | None:
    """`reserved_within` of the rank of a pipeline that reserves most."""
    config, most = planner.job.allocator, 0
    if planner.device.cuda is None or not is_replayed(planner.pp):
        return None
    for rank in ranks_to_replay(planner, choices):
        found = replay_rank(planner, rank, choices, config)
        if found is None:
            return None
        held = partial(replay_rank, planner, rank, choices, config, limit)
        most = max(most, _within(found, limit, held))
    return most


def _within(found: Reserved, limit: int, replayed: Callable[[], Reserved | None]) -> int:
    """Bytes that are reserved on a device with `limit`; `found`: on one with as many as are asked for, `replayed`: on that
    one."""
    if found.reserved <= limit:
        return found.reserved
    try:
        held = replayed()
    except DeviceMemoryError:
        return found.reserved
    return found.reserved if held is None or held.given_back else held.reserved


def most_allocated(question: Question, inputs: int, *, predicted: bool) -> int:
    """The highest peak that could fit beside `inputs`; `predicted`: what is reserved beyond it is."""
    left = max(0, question.limit - inputs)
    if predicted or question.device.cuda is None:
        return left
    return int(left / (1 + OVERHEAD))
