"""What happens where the caching allocator wants more than the device has: free segments go back, or nothing does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nemo_like.planning.allocator_model import DeviceMemoryError
from nemo_like.planning.block import Choice
from nemo_like.planning.reserved import Reserved, replay, replay_rank

if TYPE_CHECKING:
    from nemo_like.options.memory import AllocatorConfig
    from nemo_like.planning.planner import Planner
    from nemo_like.planning.stages import PipelinePlanner

    _Replaying = Callable[[AllocatorConfig, int | None], Reserved]


@dataclass(frozen=True)
class Tight:
    """A step that would reserve more than the device has."""

    reserved: int
    """Bytes that it would reserve."""
    memory: int
    """Bytes of the device. CUDA's context and the collectives' buffers, which are not known, take some of them."""
    given_back: int | None
    """How often in a step free segments go back to the device, which waits for it each time; None: it runs out of memory."""
    growing: int | None
    """Bytes that it would reserve with ``expandable_segments:True``; None: that is on."""

    def words(self, name: str) -> str:
        """One sentence on the row `name`."""
        what = f"ac={name!r} would reserve {self.reserved / 2**30:.2f} GiB, and the GPU has {self.memory / 2**30:.2f}: "
        often = "once" if self.given_back == 1 else f"{self.given_back} times"
        what += (
            "it runs out of memory, by the model of the allocator"
            if self.given_back is None
            else f"the allocator gives free segments back {often} a step, by the model of it"
        )
        if self.growing is None or self.growing >= self.reserved:
            return f"{what}."
        return f"{what}; with PYTORCH_ALLOC_CONF=expandable_segments:True it reserves {self.growing / 2**30:.2f}."


def tight(planner: Planner, choices: Sequence[Choice]) -> Tight | None:
    """Whether such a step is; None: it is not, or what it reserves is not known."""
    found = planner.reserved(choices)
    if found is None:
        return None
    return _tight(found.reserved, planner, lambda config, memory: replay(planner, choices, config, memory))


def tight_rank(
    planner: PipelinePlanner, choices: Sequence[Sequence[Choice]], reserved: Sequence[int] | None
) -> Tight | None:
    """The same of the rank of a pipeline that reserves most; `reserved`: bytes of every rank, None where not known."""
    if reserved is None:
        return None
    worst = max(range(len(reserved)), key=lambda rank: reserved[rank])
    return _tight(reserved[worst], planner, lambda config, memory: replay_rank(planner, worst, choices, config, memory))


def _tight(reserved: int, planner: Planner | PipelinePlanner, replayed: _Replaying) -> Tight | None:
    config, memory = planner.job.allocator, planner.device.memory_bytes
    if reserved <= memory:
        return None
    try:
        given_back = replayed(config, memory).given_back
    except DeviceMemoryError:
        given_back = None
    grown = None if config.expandable_segments else replayed(replace(config, expandable_segments=True), None)
    return Tight(reserved, memory, given_back, None if grown is None else grown.reserved)
