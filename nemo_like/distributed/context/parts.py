"""The way in which the sequences of one model are cut on this rank, and the call that is being cut now."""

from __future__ import annotations

import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from nemo_like._util.module_tree import bare
from nemo_like.distributed.context import sequence_ops
from nemo_like.distributed.context.sequence_ops import gather_sequence
from nemo_like.transformers_compat import parameter_names

Blocks = Generator[tuple[slice, Tensor, bool], Any, "Tensor | None"]
"""Yields (rows of the queries, their keys and values (2, B, KV heads, M, D), whether causal). In backward it is sent the
gradients of each block's keys and of its values, and returns those of this rank's part, (2, B, KV heads, L, D)."""

MARK = "_nemo_like_sequence_parts"
"""The attribute of every module below a cut stack, which leads its attention to the `Parts`."""


@dataclass(frozen=True)
class CutStack:
    """A module whose layers run on parts of sequences, and what is around them on whole ones."""

    name: str
    """In the original model; empty: the model itself."""
    module: nn.Module
    layers: tuple[nn.Module, ...]
    transformers: bool
    """The stack is one of transformers; else its attention goes through torch's functions."""
    call: nn.Module
    """Whose hooks see what it is called with: `module`, but for a model that is a pipeline's stage."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names that its forward takes, in order."""
        return parameter_names(bare(self.call).forward)


@dataclass
class Attention(ABC):
    """One call of attention, by any of the three functions; queries, keys and values (B, H, L, D) are those of a part."""

    parts: Parts
    function: Callable[..., Any]
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    causal: bool
    """There is no mask, and no query sees a later key."""
    arguments: dict[str, Any]
    """The other arguments of the call."""

    fused = True
    """The function is `scaled_dot_product_attention` in the end."""

    @abstractmethod
    def run(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool = False) -> Any:
        """Call the function for other queries (B, H, L, D), keys, values and mask."""

    def states(self, output: Any) -> Tensor:
        """Return (B, H, L, D) of an output of `run`."""
        states: Tensor = output
        return states

    def output(self, states: Tensor) -> Any:
        """Return the output of such states, the opposite of `states`."""
        return states


class ContextMethod(ABC):
    """One method's demands on a model, and its computation in place of attention. It has no state."""

    word: str
    """Its name in `ContextParallel.method`."""
    takes_masks = True
    """Attention may have a mask; else a caller's mask that hides nothing is taken for none."""
    rows = 1.0
    """The most queries of a block, as a share of this rank's."""
    cuts_heads = False
    """Attention runs on some heads of the whole sequence, and masks have all rows; else on all heads of this rank's rows."""

    def check(self, stack: CutStack, ranks: int) -> None:  # noqa: B027
        """Raise ValueError where the layers of `stack`, which is of transformers, cannot have this attention."""

    @abstractmethod
    def attend(self, call: Attention) -> Any:
        """Return what `call.function` would for this rank's queries, over the keys of the whole sequence."""

    def blocks(self, part: Tensor, rank: int, ranks: int, group: str, backward: bool = False) -> Blocks:
        """Yield the blocks of causal attention, given this rank's keys and values (2, B, KV heads, L, D)."""
        raise NotImplementedError

    def held(self, part: int, ranks: int, backward: bool) -> int:
        """Return the most bytes that `blocks` holds, `part` being those of this rank's keys and values; of a block's
        gradients as well."""
        raise NotImplementedError


@dataclass
class Parts:
    """One model's context parallelism on one rank."""

    ranks: int
    rank: int
    group: str
    """Name of the process group, for the operators of `sequence_ops`."""
    method: ContextMethod
    planning: bool = False
    """Tensors have no values, and there are no other ranks."""
    verifying: str | None = None
    """``whole`` or ``parts`` in the two calls that are compared."""
    seen: list[Tensor] = field(default_factory=list)
    """In these calls: the hidden states that the stack gave."""
    whole_head: bool = False
    """In this call, what comes behind the stack gets whole sequences, on every rank."""
    idle: bool = False
    """This call is not cut: every rank has whole sequences (generation with a cache)."""

    def cut(self, whole: Tensor, dim: int, value: float = 0) -> Tensor:
        """This rank's part on `dim` of a whole, not yet padded sequence."""
        return sequence_ops.cut(sequence_ops.pad(whole, dim, self.ranks, value), dim, self.ranks, self.rank)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The whole, padded sequence on `dim`; with gradients."""
        return gather_sequence(part, dim, self.ranks, self.group)

    def positions(self, padded: int, device: object) -> Tensor:
        """Return the positions of this rank's tokens in a sequence of `padded` tokens."""
        return sequence_ops.positions(padded, self.ranks, self.rank, device)  # type: ignore[arg-type]


@dataclass
class StackCall:
    """Arguments that a stack was called with, for the masks that are made while it runs."""

    parts: Parts
    length: int
    """Tokens of the whole sequence, before padding."""
    masked: bool
    """The caller gave an attention mask."""
    documents: Tensor | None = None
    """(B, S) numbers of packed documents; None: one document per row."""

    @property
    def padded(self) -> bool:
        return sequence_ops.padded_length(self.length, self.parts.ranks) != self.length


CURRENT: contextvars.ContextVar[StackCall | None] = contextvars.ContextVar("nemo_like_stack_call", default=None)


def parts_of(module: nn.Module) -> Parts | None:
    """The `Parts` of a module below a cut stack; None elsewhere, and while the model runs on whole sequences."""
    parts = getattr(module, MARK, None)
    return None if parts is None or parts.idle else parts
