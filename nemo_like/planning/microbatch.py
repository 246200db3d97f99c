"""Which gradients are there while each microbatch of a step runs, under FSDP2, under DDP and on one device."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.options import StepSpec
from nemo_like.planning.sharding import Sharding


@dataclass(frozen=True)
class Microbatch:
    """What one microbatch finds, and what its backward does with the gradients that it makes."""

    gradients: int = 0
    """Alive before its forward, bytes."""
    accumulates: bool = False
    """Autograd adds to a parameter's gradient that is there, so that a layer's new gradients are never all alive."""
    reduces: bool = True
    """FSDP2: reduces over the ranks; else each rank keeps whole gradients."""
    adds: bool = False
    """What is reduced, or kept whole, is added to what was there before."""
    frees: bool = False
    """Whole gradients were there; each goes once it is in its unit's buffer or DDP's bucket."""


def microbatches(step: StepSpec, sharding: Sharding, *, ddp: bool, cast: bool) -> list[Microbatch]:
    """The microbatches of a step among which is the one that holds most.

    Args:
        step: how many there are, and whether gradients stay between steps.
        sharding: FSDP2's units, whose gradients these are.
        ddp: gradients are views of buckets that stay, whatever `step` frees.
        cast: FSDP2 computes in another dtype than it reduces in, so that gradients are added up outside of autograd.
    """
    shards = sum(unit.grad for unit in sharding.all)
    once = step.microbatches > 1 and step.sync == "last"
    if sharding.on:
        return _sharded(step, sharding, shards, once=once, cast=cast)
    if not ddp:
        return [Microbatch(shards, accumulates=True) if step.accumulates else Microbatch()]
    if not once or step.zero_grad == "zero":
        return [Microbatch(shards, accumulates=True)]
    # Without a reduction there is no bucket for a gradient to become a view of: both are there until the last backward.
    both = Microbatch(2 * shards, accumulates=True)
    if step.microbatches > 2:
        return [both]
    return [Microbatch(shards), Microbatch(2 * shards, accumulates=True, frees=True)]


def _sharded(step: StepSpec, sharding: Sharding, shards: int, *, once: bool, cast: bool) -> list[Microbatch]:
    stays = step.zero_grad == "zero"
    if not once:
        return [Microbatch(shards, adds=True) if step.accumulates else Microbatch()]
    left, whole = shards if stays else 0, sum(unit.whole_grad for unit in sharding.all)
    if step.microbatches > 2:
        before = Microbatch(left + whole, accumulates=not cast, reduces=False, adds=True)
    else:
        before = Microbatch(left, reduces=False)
    return [before, Microbatch(left + whole, accumulates=not cast, adds=stays, frees=True)]
