"""The way in which the sequences of one model are cut on this rank: its parts, its documents, the call that is being cut
now, and the hooks of the stack of layers that cut it."""

from __future__ import annotations

import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.log import say_once
from nemo_like._util.module_tree import bare
from nemo_like._util.tensors import autocast_dtype
from nemo_like.distributed.context import sequence_ops
from nemo_like.losses.model_loss import LABELS
from nemo_like.torch_compat import is_fake
from nemo_like.transformers_compat import USE_CACHE, parameter_names

# Yields (rows of the queries, their keys and values (2, B, KV heads, M, D), whether causal). In backward it is sent the
# gradients of each block's keys and of its values, and returns those of this rank's part, (2, B, KV heads, L, D).
Blocks = Generator[tuple[slice, Tensor, bool], Any, "Tensor | None"]

# The attribute of every module below a cut stack, which leads its attention to the `Parts`.
MARK = "_nemo_like_sequence_parts"


@dataclass(frozen=True)
class CutStack:
    """A module whose layers run on parts of sequences, and the modules around them on whole ones."""

    name: str  # In the original model; empty: the model itself.
    module: nn.Module
    layers: tuple[nn.Module, ...]
    transformers: bool  # The stack is one of transformers; else its attention goes through torch's functions.
    call: nn.Module  # The module whose hooks see its inputs: `module`, but for a model that is a pipeline's stage.

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
    causal: bool  # There is no mask, and no query sees a later key.
    arguments: dict[str, Any]  # The other arguments of the call.

    fused = True  # The function is `scaled_dot_product_attention` in the end.

    def __post_init__(self) -> None:
        # As autocast casts for that function. It has no rule for the operators here, and rotary embeddings are float32.
        if self.fused:
            states = self.query, self.key, self.value
            self.query, self.key, self.value = (state.to(autocast_dtype(state)) for state in states)

    @abstractmethod
    def run(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool = False) -> Any:
        """Call the function for other queries (B, H, L, D), keys, values and mask."""

    def states(self, output: Any) -> Tensor:
        """Return (B, H, L, D) of an output of `run`."""
        return output

    def output(self, states: Tensor) -> Any:
        """Return the output of such states, the opposite of `states`."""
        return states


class ContextMethod(ABC):
    """One method's demands on a model, and its computation in place of attention. It has no state."""

    word: str  # Its name in `ContextParallel.method`.
    takes_masks = True  # Attention may have a mask; else a caller's mask that hides nothing is taken for none.
    rows = 1.0  # The most queries of a block, as a share of this rank's.
    # Attention runs on some heads of the whole sequence, and masks have all rows; else on all heads of this rank's
    # rows.
    cuts_heads = False

    def check(self, stack: CutStack, ranks: int) -> None:  # noqa: B027
        """Raise ValueError where the layers of `stack`, which is of transformers, cannot have this attention."""

    @abstractmethod
    def attend(self, call: Attention) -> Any:
        """Return the result of `call.function` for this rank's queries over the keys of the whole sequence."""

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
    group: str  # Name of the process group, for the operators of `sequence_ops`.
    method: ContextMethod
    planning: bool = False  # Tensors have no values, and there are no other ranks.
    verifying: str | None = None  # ``whole`` or ``parts`` in the two calls that are compared.
    seen: list[Tensor] = field(default_factory=list)  # In these calls: the hidden states that the stack gave.
    whole_head: bool = False  # In this call, the modules behind the stack get whole sequences, on every rank.
    idle: bool = False  # This call is not cut: every rank has whole sequences (generation with a cache).

    def cut(self, whole: Tensor, dim: int, value: float = 0) -> Tensor:
        """This rank's part on `dim` of a whole, not yet padded sequence."""
        return sequence_ops.cut(sequence_ops.pad(whole, dim, self.ranks, value), dim, self.ranks, self.rank)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The whole, padded sequence on `dim`; with gradients."""
        return sequence_ops.gather_sequence(part, dim, self.ranks, self.group)

    def positions(self, padded: int, device: object) -> Tensor:
        """Return the positions of this rank's tokens in a sequence of `padded` tokens."""
        return sequence_ops.positions(padded, self.ranks, self.rank, device)  # type: ignore[arg-type]


@dataclass
class StackCall:
    """Arguments that a stack was called with, for the masks that are made while it runs."""

    parts: Parts
    length: int  # Tokens of the whole sequence, before padding.
    masked: bool  # The caller gave an attention mask.
    documents: Tensor | None = None  # (B, S) numbers of packed documents; None: one document per row.

    @property
    def tokens_of_part(self) -> int:
        """With padding."""
        return sequence_ops.padded_length(self.length, self.parts.ranks) // self.parts.ranks

    @property
    def padded(self) -> bool:
        return self.tokens_of_part * self.parts.ranks != self.length


CURRENT: contextvars.ContextVar[StackCall | None] = contextvars.ContextVar("nemo_like_stack_call", default=None)


def parts_of(module: nn.Module) -> Parts | None:
    """The `Parts` of a module below a cut stack; None elsewhere, and while the model runs on whole sequences."""
    parts = getattr(module, MARK, None)
    return None if parts is None or parts.idle else parts


# The documents of packed rows as numbers, positions and lengths, and the rows of the call that runs.


@dataclass
class PackedRows:
    """Documents in the rows of the call that runs."""

    numbers: Tensor  # (B, S) of the documents.
    apart: bool = False  # A mask was made from the numbers, or lengths go to the kernel.


# True while a step is predicted in which flex attention has the masks of documents and windows.
in_blocks: contextvars.ContextVar[bool] = contextvars.ContextVar("nemo_like_masks_in_blocks", default=False)


class BlocksOfMask:
    """In place of a block mask then: no kernel is given a mask, and none skips a block."""


# None: the rows of the call that runs are whole.
running: contextvars.ContextVar[PackedRows | None] = contextvars.ContextVar("nemo_like_documents", default=None)


def kept_apart() -> None:
    """To be called by who makes a mask that hides other documents."""
    if (rows := running.get()) is not None:
        rows.apart = True


def once_for_all_layers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a boolean `mask` for torch's attention is True, else -inf: of booleans attention makes these numbers in each
    layer, and keeps them for backward."""
    if mask.device.type != "cpu":
        say_once(
            "attn_implementation='sdpa' has documents and windows of attention in a mask of tokens by tokens, which kernels "
            "do not skip. Load the model with 'flex_attention' (or 'flash_attention_2' without cp), which compute less."
        )
    zero, hidden = (torch.scalar_tensor(number, dtype=dtype, device=mask.device) for number in (0.0, -torch.inf))
    return torch.where(mask, zero, hidden)


def documents_of(positions: object, batch: int) -> Tensor | None:
    """(B, S) numbers of the documents in each row, by where `positions` do not go on by one; None where they all do.

    positions: (B, S) or (1, S), or (4, B, S) whose first stream counts tokens; other shapes tell nothing.

    >>> documents_of(torch.tensor([[0, 1, 2, 0, 1]]), 1).tolist()
    [[0, 0, 0, 1, 1]]
    """
    if not isinstance(positions, Tensor):
        return None
    if positions.ndim == 3 and len(positions) == 4:
        positions = positions[0]
    if positions.ndim != 2:
        return None
    starts = positions[:, 1:] != positions[:, :-1] + 1
    if not bool(starts.any()):
        return None
    return torch.cat([torch.zeros_like(starts[:, :1]), starts], 1).cumsum(1).expand(batch, -1)


# The hooks of the stack: whole sequences in, this rank's part out.
#
# Every argument is told apart by its name and shape: (B, S, ...) is cut, a 2-D attention mask stays whole (masks are made
# over all keys), a 4-D one keeps this rank's rows, and positions are counted before the cut.


_MASK, _POSITIONS = "attention_mask", "position_ids"


class StackHooks:
    """The hooks of the stack of one model."""

    def __init__(self, stack: CutStack, parts: Parts) -> None:
        self._stack, self._parts = stack, parts
        self._tokens: list[Any] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pre-hook."""
        names = self._stack.arguments
        arguments = dict(zip(names, args)) | kwargs
        if len(args) > len(names):
            raise NotImplementedError(
                f"cp cannot tell the names of the {len(args) - len(names)} last positional arguments: give them by "
                "keyword."
            )
        if self._parts.idle:
            self._tokens.append(CURRENT.set(None))
            return None
        call, main = self._call(arguments)
        self._tokens.append(CURRENT.set(call))
        cut = {name: self._cut(call.length, name, value) for name, value in arguments.items()}
        self._add_positions(call, main, cut)
        if USE_CACHE in names or USE_CACHE in arguments:
            cut[USE_CACHE] = False  # a cache of a part is of no use, and a mask is made for its length
        return (), cut

    def after(self, module: nn.Module, args: object, output: object) -> Any:
        """The forward hook, also after an exception."""
        call = CURRENT.get()
        if self._tokens:
            CURRENT.reset(self._tokens.pop())
        states = next(iter(tensors_of(output)), None)
        if states is not None and self._parts.verifying is not None:
            self._parts.seen.append(states)
        if states is None or call is None or not call.parts.whole_head or states.shape[1] != call.tokens_of_part:
            return None
        return exchange(output, states, call.parts.gather(states, 1)[:, : call.length])

    def _call(self, arguments: dict[str, Any]) -> tuple[StackCall, Tensor]:
        """Return the call that is cut, and the tensor that its sequence is read from."""
        main = main_input(arguments)
        if main is None:
            raise ValueError(
                f"cp cuts the sequence of {type(self._stack.module).__name__}, and this call has neither input_ids nor "
                "inputs_embeds."
            )
        mask, positions = arguments.get(_MASK), arguments.get(_POSITIONS)
        known = mask is None and not is_fake(main)  # while a plan is traced, positions have no values
        documents = documents_of(positions, main.shape[0]) if known else None
        if documents is not None:
            missing = sequence_ops.padded_length(main.shape[1], self._parts.ranks) - main.shape[1]
            documents = torch.cat([documents, documents[:, -1:].expand(-1, missing)], 1)
        may_be_none = not self._parts.method.takes_masks and isinstance(mask, Tensor) and mask.ndim == 2
        masked = mask is not None and not (may_be_none and bool(mask.all()))  # one that hides nothing is none
        return StackCall(self._parts, main.shape[1], masked, documents), main

    def _cut(self, length: int, name: str, value: Any) -> Any:
        parts = self._parts
        if name == _MASK and value is not None:
            return self._cut_mask(length, value)
        if not isinstance(value, Tensor):
            return value
        if name == _POSITIONS:
            return parts.cut(_continued(value, parts.ranks), value.ndim - 1)
        if value.ndim >= 2 and value.shape[1] == length:
            return parts.cut(value, 1)
        if length in value.shape[1:] and name not in LABELS:
            raise NotImplementedError(
                f"cp cuts the sequence of {length} tokens, and cannot tell which dim of {name} {_shape(value)} it is. "
                "Known are (B, S, ...), position_ids and attention masks."
            )
        return value

    def _cut_mask(self, length: int, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._cut(length, _MASK, mask) for key, mask in value.items()}
        if isinstance(value, Tensor) and value.ndim == 2:
            return sequence_ops.pad(value, 1, self._parts.ranks)
        if isinstance(value, Tensor) and value.ndim == 4 and value.shape[-1] == length:
            return cut_given_mask(self._parts, value, length)
        raise NotImplementedError(f"cp cannot cut the attention mask {_shape(value)}; give (B, S) or (B, 1, S, S).")

    def _add_positions(self, call: StackCall, main: Tensor, cut: dict[str, Any]) -> None:
        """Give the stack positions and a mask, where it takes them and the caller gave none."""
        parts, names = self._parts, self._stack.arguments
        if _POSITIONS in names and cut.get(_POSITIONS) is None:
            cut[_POSITIONS] = parts.positions(sequence_ops.padded_length(call.length, parts.ranks), main.device)[None]
        # A mask that is there tells transformers how many keys there are, and that position_ids are not a sign of packing.
        if _MASK in names and cut.get(_MASK) is None:
            real = torch.ones(main.shape[0], call.length, dtype=torch.long, device=main.device)
            cut[_MASK] = sequence_ops.pad(real, 1, parts.ranks)


def main_input(arguments: dict[str, Any]) -> Tensor | None:
    """Return the tensor that the sequence is read from: ids or embeddings, or a plain model's first matrix of whole
    numbers."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(arguments.get(name), Tensor):
            return arguments[name]
    tensors = (value for name, value in arguments.items() if isinstance(value, Tensor) and name not in LABELS)
    return next((value for value in tensors if value.ndim == 2 and not value.is_floating_point()), None)


def cut_given_mask(parts: Parts, mask: Tensor, length: int) -> Tensor:
    """A caller's own mask (B, 1 or H, S, S) to the rows of this rank (to all, if it has some heads), over padded keys."""
    # Padding is never looked at; its own rows are not empty, or their softmax would be NaN.
    hidden = torch.finfo(mask.dtype).min if mask.is_floating_point() else 0
    missing = sequence_ops.padded_length(length, parts.ranks) - length
    if missing:
        mask = sequence_ops.pad(mask, mask.ndim - 1, parts.ranks, hidden)
        if mask.shape[-2] == length:
            mask = torch.cat([mask, mask[..., -1:, :].expand(*mask.shape[:-2], missing, mask.shape[-1])], -2)
    if mask.shape[-2] == 1 or parts.method.cuts_heads:
        return mask
    return sequence_ops.cut(mask, mask.ndim - 2, parts.ranks, parts.rank)


def _continued(positions: Tensor, ranks: int) -> Tensor:
    """Positions (..., S) with padding that goes on counting, so that it is not a document of its own."""
    missing = sequence_ops.padded_length(positions.shape[-1], ranks) - positions.shape[-1]
    if not missing:
        return positions
    more = positions[..., -1:] + torch.arange(1, missing + 1, device=positions.device, dtype=positions.dtype)
    return torch.cat([positions, more], -1)


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


# The outputs of a model or a stack.


def tensors_of(output: object) -> list[Tensor]:
    """Return the tensors that a model returned, but for those in containers inside of its output."""
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return [value for value in values if isinstance(value, Tensor)]


def exchange(output: Any, old: Tensor, new: Tensor) -> Any:
    """Return the output of a model, with `new` in the place of `old`."""
    if output is old:
        return new
    if isinstance(output, dict):
        return type(output)(**{key: new if value is old else value for key, value in output.items()})
    items = [new if item is old else item for item in output]
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
