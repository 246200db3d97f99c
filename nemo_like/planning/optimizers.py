"""What an optimizer holds on one rank: its state, and the temporaries of its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes, by parameter in the optimizer's order."""

    states: tuple[tuple[int, ...], ...]
    """The tensors of each parameter's state."""
    loop: tuple[tuple[int, ...], ...] = ()
    """Temporaries of each parameter, while it is stepped alone; the last one of each stays until the next is stepped."""
    together: tuple[int, ...] = ()
    """Temporaries that are there at one time, one of each parameter."""

    @property
    def state(self) -> int:
        """All of the state."""
        return sum(map(sum, self.states))

    @property
    def step(self) -> int:
        """Most that the step's temporaries take."""
        before = [0, *(sizes[-1] for sizes in self.loop)]
        return max(max((last + sum(sizes) for last, sizes in zip(before, self.loop)), default=0), sum(self.together))


def optimizer_memory(trained: Sequence[int], name: str, *, foreach: bool) -> OptimizerMemory:
    """The memory of an optimizer on one rank.

    AdamW's loop over parameters holds two temporaries of one parameter, and, from the second on, the last one of the
    parameter before; a ``foreach`` step one of all parameters; a fused one none. 8-bit states: one byte each and a
    float32 scale per 256 values (Dettmers et al., arXiv 2110.02861).

    Args:
        trained: bytes of each parameter on this rank, in the optimizer's order.
        name: one of `nemo_like.options.OPTIMIZERS`.
        foreach: whether torch steps with ``foreach`` where nobody says.
    """
    if name == "adamw":
        name = "adamw-foreach" if foreach else "adamw-loop"
    if name == "sgd":
        return OptimizerMemory(((),) * len(trained))
    if name == "sgd-momentum":
        return OptimizerMemory(tuple((size,) for size in trained))
    if name == "adamw-8bit":
        return OptimizerMemory(tuple((size // 4, size // 4, size // 256, size // 256) for size in trained))
    return OptimizerMemory(
        tuple((size, size) for size in trained),
        tuple((size, size) for size in trained) if name == "adamw-loop" else (),
        tuple(trained) if name == "adamw-foreach" else (),
    )
