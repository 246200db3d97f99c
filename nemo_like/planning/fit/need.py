"""What decides whether a configuration fits: what CUDA's caching allocator reserves, where that is predicted.

Users run out of what is reserved, not of what tensors take. A step fits where the allocator, replayed with no more memory
than the limit, goes through without giving segments back in every step, for which the device would have to wait. Where
nothing reserves more than tensors take (the CPU), these decide. And where there is an allocator but no prediction of it
(what waits in host memory, pipelines), it is taken to reserve `OVERHEAD` more than tensors take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_like.planning.allocator_model import DeviceMemoryError
from nemo_like.planning.block import Choice
from nemo_like.planning.fit.question import Question
from nemo_like.planning.peak import Peak
from nemo_like.planning.planner import Planner
from nemo_like.planning.reserved import replay

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


def need_of(question: Question, peak: Peak, reserved: int | None) -> Need:
    """Of a step with that peak; `reserved`: see `reserved_within`."""
    if question.device.cuda is None:
        return Need(peak.total, ALLOCATED)
    if reserved is None:
        return Need(int(peak.total * (1 + OVERHEAD)), WITH_OVERHEAD)
    return Need(reserved, RESERVED, reserved)


def reserved_within(planner: Planner, choices: Sequence[Choice], limit: int) -> int | None:
    """Bytes that are reserved on a device with `limit`, or, where it does not have them, those that would be on a larger
    one; None: not predicted."""
    found = planner.reserved(choices)
    if found is None or found.reserved <= limit:
        return None if found is None else found.reserved
    try:
        held = replay(planner, choices, planner.setup.allocator, limit)
    except DeviceMemoryError:
        return found.reserved
    return found.reserved if held.given_back else held.reserved


def most_allocated(question: Question, *, predicted: bool) -> int:
    """The highest peak that could fit; `predicted`: what is reserved beyond it is."""
    if predicted or question.device.cuda is None:
        return question.limit
    return int(question.limit / (1 + OVERHEAD))
