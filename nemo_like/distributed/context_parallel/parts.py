"""How the sequences of one model are cut on this rank, and the call that is being cut now."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass

from torch import Tensor, nn

from nemo_like.distributed.context_parallel import layout
from nemo_like.distributed.context_parallel.sequence_ops import gather_sequence

MARK = "_nemo_like_sequence_parts"
"""The attribute of every module below a cut stack, which leads its attention to the `Parts`."""


@dataclass
class Parts:
    """One model's context parallelism on one rank."""

    ranks: int
    rank: int
    group: str
    """Name of the process group, for the operators of `sequence_ops`."""
    method: str = "all_gather"
    verifying: str | None = None
    """``whole`` or ``parts`` in the two calls that are compared."""
    idle: bool = False
    """This call is not cut: every rank has whole sequences (generation with a cache)."""

    def cut(self, whole: Tensor, dim: int, value: float = 0) -> Tensor:
        """This rank's part on `dim` of a whole, not yet padded sequence."""
        return layout.cut(layout.pad(whole, dim, self.ranks, value), dim, self.ranks, self.rank)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The whole, padded sequence on `dim`; with gradients."""
        return gather_sequence(part, dim, self.ranks, self.group)

    def positions(self, padded: int, device: object) -> Tensor:
        """Of this rank's tokens in a sequence of `padded` tokens."""
        return layout.positions(padded, self.ranks, self.rank, device)  # type: ignore[arg-type]


@dataclass
class StackCall:
    """What a stack was called with, for the masks that are made while it runs."""

    parts: Parts
    length: int
    """Tokens of the whole sequence, before padding."""
    masked: bool
    """Whether the caller gave an attention mask."""
    documents: Tensor | None = None
    """(B, S) numbers of packed documents; None: one document per row."""

    @property
    def padded(self) -> bool:
        return layout.padded_length(self.length, self.parts.ranks) != self.length


CURRENT: contextvars.ContextVar[StackCall | None] = contextvars.ContextVar("nemo_like_stack_call", default=None)


def parts_of(module: nn.Module) -> Parts | None:
    """The `Parts` of a module below a cut stack; None elsewhere, and while the model runs on whole sequences."""
    parts = getattr(module, MARK, None)
    return None if parts is None or parts.idle else parts
