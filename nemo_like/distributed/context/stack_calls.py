"""The hooks of the stack: whole sequences in, this rank's part out.

Every argument is told apart by its name and shape: (B, S, ...) is cut, a 2-D attention mask stays whole (masks are made
over all keys), a 4-D one keeps this rank's rows, and positions are counted before the cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.distributed.context import masks, sequence_ops
from nemo_like.distributed.context.parts import CURRENT, CutStack, Parts, StackCall
from nemo_like.distributed.document_numbers import documents_of
from nemo_like.losses.model_loss import LABELS
from nemo_like.torch_compat import is_fake
from nemo_like.transformers_compat import USE_CACHE

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
                f"cp cannot tell what the {len(args) - len(names)} last positional arguments are; name them."
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
        return None if states is None or call is None else _gathered(call, output, states)

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
        masked = mask is not None
        if masked and not self._parts.method.takes_masks:  # one that hides nothing is none
            masked = not (isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all()))
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
            return masks.cut_given(self._parts, value, length)
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
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point() and name not in LABELS:
            return value
    return None


def _continued(positions: Tensor, ranks: int) -> Tensor:
    """Positions (..., S) with padding that goes on counting, so that it is not a document of its own."""
    missing = sequence_ops.padded_length(positions.shape[-1], ranks) - positions.shape[-1]
    if not missing:
        return positions
    more = positions[..., -1:] + torch.arange(1, missing + 1, device=positions.device, dtype=positions.dtype)
    return torch.cat([positions, more], -1)


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


# What a model or a stack returns.


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


def _gathered(call: StackCall, output: object, states: Tensor) -> Any:
    """`output` with whole sequences in the place of a part's hidden `states`; None: as it is."""
    part = sequence_ops.padded_length(call.length, call.parts.ranks) // call.parts.ranks
    if not call.parts.whole_head or states.shape[1] != part:
        return None
    return exchange(output, states, call.parts.gather(states, 1)[:, : call.length])
