"""`CheckpointSpec`: what is replayed as one, what is kept of it, where that waits. And the modes, as functions to specs.

Nothing here looks into a model or changes one: `nemo_like.activation_checkpointing.apply` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypedDict, Unpack

from nemo_like.activation_checkpointing.engine.handles import Transfer
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy

KEEP_NOTHING = FullPolicy()


@dataclass(frozen=True)
class CheckpointSpec:
    """One region of a model and what happens to it. Every mode, budget, plan and config resolves to a list of these.

    >>> CheckpointSpec(("model.layers.0",)).policy
    FullPolicy()
    """

    members: tuple[str, ...]
    """Names (in the bare model) of the modules that are replayed as one, in the order in which they are called."""
    policy: Policy | None = KEEP_NOTHING
    """What is kept inside the region; None: everything, so nothing is replayed (the spec only says where it waits)."""
    transfer: Transfer | None = None
    """What moves tensors that wait in host memory. With ``policy=None``: a `Placement`, which encloses the module."""
    calls: int | None = None
    """A module that is called once a timestep: so many consecutive calls are one region. None: each call is one."""
    use_reentrant: bool = False
    """The older autograd-function form of checkpointing."""
    preserve_rng_state: bool = True
    """Replay with the forward's random numbers."""

    def __post_init__(self) -> None:
        if isinstance(self.members, str) or not self.members or not all(isinstance(m, str) and m for m in self.members):
            raise ValueError(
                f"CheckpointSpec.members is {self.members!r}; it must hold the name of at least one module below the model."
            )
        object.__setattr__(self, "members", tuple(self.members))
        if len(set(self.members)) != len(self.members):
            raise ValueError(f"CheckpointSpec.members is {self.members!r}; it names a module twice.")
        if self.calls is not None and (
            isinstance(self.calls, bool) or not isinstance(self.calls, int) or self.calls < 1
        ):
            raise ValueError(f"CheckpointSpec.calls is {self.calls!r}; it must be a whole number of timesteps >= 1.")
        self._check_combination()

    def _check_combination(self) -> None:
        several = len(self.members) > 1 or self.calls is not None
        if self.policy is None and (self.transfer is None or several):
            raise ValueError(
                f"CheckpointSpec of {', '.join(self.members)} has policy=None, which replays nothing: it must have one "
                "member and a transfer. Give it a policy to replay it."
            )
        if self.use_reentrant and several:
            raise ValueError(
                f"CheckpointSpec.use_reentrant is True for {', '.join(self.members)}: only a region of one call can be "
                "replayed by the older form. Use use_reentrant=False."
            )
        if self.use_reentrant and self.keeps_something:
            raise ValueError(
                f"CheckpointSpec.use_reentrant is True, and {type(self.policy).__name__} keeps tensors inside "
                f"{self.members[0]}, for which only the non-reentrant form has hooks. Use use_reentrant=False."
            )

    @property
    def keeps_something(self) -> bool:
        """Whether the region is replayed in part: its policy keeps the output of some operators."""
        return self.policy is not None and not self.policy.keeps_nothing


class How(TypedDict, total=False):
    """The fields of a spec that are the same for all regions of a mode."""

    policy: Policy | None
    use_reentrant: bool
    preserve_rng_state: bool


def one_region_each(names: Iterable[str], **how: Unpack[How]) -> list[CheckpointSpec]:
    """Each module a region of its own: whole layers (``full``, ``selective``) or their sub-modules (``submodule``)."""
    return [CheckpointSpec((name,), **how) for name in names]


def segments_of(
    names: Sequence[str], count: int | None = None, weights: Sequence[float] | None = None, **how: Unpack[How]
) -> list[CheckpointSpec]:
    """Segments of consecutive modules as one region each (``sequential``).

    Args:
        names: in the order in which the model calls them.
        count: how many segments; None: round(sqrt(number of modules)), which holds least for equal modules.
        weights: bytes that each module saves, to balance segments by; None: all alike.

    Raises:
        ValueError: no modules, or `count` or `weights` do not fit them.

    >>> [spec.members for spec in segments_of(["a", "b", "c"], 2)]
    [('a', 'b'), ('c',)]
    """
    specs, start = [], 0
    for size in segment_sizes(len(names), count, weights):
        specs.append(CheckpointSpec(tuple(names[start : start + size]), **how))
        start += size
    return specs


def chunks_of_calls(names: Iterable[str], chunk_size: int, **how: Unpack[How]) -> list[CheckpointSpec]:
    """Modules called once a timestep, by somebody's own loop: every `chunk_size` consecutive calls are one region.

    Backward then keeps the state at every `chunk_size`-th step, and the steps of one chunk at a time. A call that gets
    nothing from the chunk before it (a new sequence) begins a new chunk.
    """
    return [CheckpointSpec((name,), calls=chunk_size, **how) for name in names]


def segment_sizes(count: int, segments: int | None = None, weights: Sequence[float] | None = None) -> list[int]:
    """How many of `count` consecutive layers go into each segment, so that the heaviest segment is lightest.

    >>> segment_sizes(10), segment_sizes(4, 2, weights=[5, 1, 1, 1])
    ([4, 3, 3], [1, 3])
    """
    if count < 1:
        raise ValueError("There are no layers to make segments of.")
    wanted = max(1, round(count**0.5)) if segments is None else segments
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= count:
        raise ValueError(f"segments is {segments!r}; it must be a whole number from 1 to {count}, the layers.")
    if weights is None:
        return [count // wanted + (index < count % wanted) for index in range(wanted)]
    if len(weights) != count or not all(weight >= 0 for weight in weights):
        raise ValueError(f"weights is {weights!r}; it must hold one number >= 0 for each of the {count} layers.")
    # best[k][i]: the least heaviest segment of the first i layers in k segments, and where the last of them starts.
    total = [0.0, *accumulate(map(float, weights))]
    best = {1: [(total[i], 0) for i in range(count + 1)]}
    for k in range(2, wanted + 1):
        best[k] = [
            min(((max(best[k - 1][j][0], total[i] - total[j]), j) for j in range(k - 1, i)), default=(float("inf"), 0))
            for i in range(count + 1)
        ]
    sizes, end = [], count
    for k in range(wanted, 0, -1):
        start = best[k][end][1]
        sizes.append(end - start)
        end = start
    return sizes[::-1]
