"""The hooks of one stack: whole sequences in, this rank's part out.

Every argument is told apart by its name and shape: (B, S, ...) is cut, a 2-D attention mask stays whole (masks are made
over all keys), a 4-D one keeps this rank's rows, and positions are counted before the cut.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.distributed.context import masks, sequence_ops
from nemo_like.distributed.context.parts import CURRENT, CutStack, Parts, StackCall, gathers_whole
from nemo_like.distributed.context.stacks import GatheringCache, OwnMasks, cache_for, positions_of_ids
from nemo_like.distributed.document_numbers import documents_of
from nemo_like.layers.structure import class_of
from nemo_like.losses.model_loss import LABELS
from nemo_like.torch_compat import is_fake
from nemo_like.transformers_compat import MASK_OF_IDS, USE_CACHE, rope_follows_length

_LENGTH = "_nemo_like_whole_length"
_WHOLE = "_nemo_like_whole_states"
_MAIN = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
_PARTS = ("encoder_hidden_states",)
"""Arguments that another stack made, and that are parts already."""


class StackHooks:
    """The hooks of one stack of one model."""

    def __init__(self, stack: CutStack, parts: Parts, paired: bool = False) -> None:
        """paired: it is an encoder or a decoder, and which of the two its calls show."""
        self._stack, self._parts, self._paired = stack, parts, paired
        self._cached = stack.cache_argument if stack.cached else None
        self._tokens: list[Any] = []
        self._own_masks: list[OwnMasks] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = self._stack.arguments
        arguments = dict(zip(names, args)) | kwargs
        rest = args[len(names) :]
        if self._parts.idle or rest:
            if rest:
                raise NotImplementedError(
                    f"cp cannot tell what the {len(rest)} last positional arguments are; name them."
                )
            self._tokens.append(CURRENT.set(None))
            return None
        call = self._call(arguments)
        self._tokens.append(CURRENT.set(call))
        if not self._stack.transformers and self._parts.method.triangles:
            main = main_input(arguments)
            assert main is not None  # `_call` looked
            dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
            self._parts.make_triangles(sequence_ops.padded_length(call.length, self._parts.ranks), dtype, main.device)
        cut = {name: self._cut(call, name, value, arguments) for name, value in arguments.items()}
        self._positions(call, arguments, cut)
        if USE_CACHE in names or USE_CACHE in arguments:
            cut[USE_CACHE] = False  # a cache of a part is of no use, and a mask is made for its length
        if self._cached is not None:
            cut[self._cached] = cache_for(self._parts, call.length)
            self._own_masks.append(OwnMasks())
        return (), cut

    def after(self, module: nn.Module, args: object, output: object) -> Any:
        call = CURRENT.get()
        if self._tokens:
            CURRENT.reset(self._tokens.pop())
        if call is not None and self._own_masks:
            self._own_masks.pop().put_back()
            if isinstance(output, dict):
                for name in [name for name, value in output.items() if isinstance(value, GatheringCache)]:
                    output[name] = None  # it is none to go on with
        states = next(iter(tensors_of(output)), None)
        if states is None:
            return None
        if self._parts.verifying is not None:
            self._parts.seen.append(states)
        if call is None:
            return None
        setattr(states, _LENGTH, call.length)
        return _gathered(call, output, states)

    def _call(self, arguments: dict[str, Any]) -> StackCall:
        main = main_input(arguments)
        if main is None:
            raise ValueError(
                f"cp cuts the sequence of {type(self._stack.module).__name__}, and this call has neither input_ids nor "
                "inputs_embeds."
            )
        mask = arguments.get("attention_mask")
        length = main.shape[1]
        positions = arguments.get("position_ids")
        known = mask is None and not is_fake(main)  # while a plan is traced, positions have no values
        documents = documents_of(positions, main.shape[0]) if known else None
        if documents is not None:
            documents = torch.cat(
                [
                    documents,
                    documents[:, -1:].expand(-1, sequence_ops.padded_length(length, self._parts.ranks) - length),
                ],
                1,
            )
        masked = mask is not None
        if masked and not self._parts.method.takes_masks:  # one that hides nothing is none
            masked = not (isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all()))
        last = not self._paired or arguments.get("encoder_hidden_states") is not None
        return StackCall(self._parts, length, masked, documents, last)

    def _cut(self, call: StackCall, name: str, value: Any, arguments: dict[str, Any]) -> Any:
        parts, length = self._parts, call.length
        if name == "attention_mask" or name == "decoder_attention_mask":
            if isinstance(value, dict):
                return {key: self._cut(call, name, mask, arguments) for key, mask in value.items()}
            if value is None:
                return None
            if isinstance(value, Tensor) and value.ndim == 2:
                return sequence_ops.pad(value, 1, parts.ranks)
            if isinstance(value, Tensor) and value.ndim == 4 and value.shape[-1] == length:
                return masks.cut_given(parts, value, length)
            raise NotImplementedError(f"cp cannot cut the attention mask {_shape(value)}; give (B, S) or (B, 1, S, S).")
        if name == "encoder_attention_mask":
            return None if value is None else sequence_ops.pad(value, value.ndim - 1, parts.ranks)
        if name == "deepstack_visual_embeds":
            return _deepstack(parts, value, arguments.get("visual_pos_masks"))
        if not isinstance(value, Tensor) or name in _PARTS:
            return value
        if name == "position_ids":
            return parts.cut(_continued(value, parts.ranks), value.ndim - 1)
        if value.ndim >= 2 and value.shape[1] == length:
            return parts.cut(value, 1)
        if length in value.shape[1:] and name not in LABELS:
            raise NotImplementedError(
                f"cp cuts the sequence of {length} tokens, and cannot tell which dim of {name} {_shape(value)} it is. "
                "Known are (B, S, ...), position_ids and attention masks."
            )
        return value

    def _refuse_positions_of_a_mask(self, mask: object) -> None:
        """Some models (OPT) count positions over what a mask shows."""
        if not isinstance(mask, Tensor) or mask.ndim != 2 or is_fake(mask) or bool(mask.all()):
            return
        reader = next((module for module in self._stack.module.modules() if _reads_a_mask(module)), None)
        if reader is not None:
            raise ValueError(
                f"{type(reader).__name__} counts positions from the attention mask, and cp counts them before the cut: pass "
                "position_ids with a mask that hides tokens."
            )

    def _positions(self, call: StackCall, arguments: dict[str, Any], cut: dict[str, Any]) -> None:
        parts, names = self._parts, self._stack.arguments
        main = main_input(cut)
        assert main is not None  # `_call` looked
        padded = sequence_ops.padded_length(call.length, parts.ranks)
        whole = arguments.get("position_ids")
        call.longest = whole.max() if isinstance(whole, Tensor) else call.length - 1
        if "position_ids" in names and whole is None:
            self._refuse_positions_of_a_mask(arguments.get("attention_mask"))
            counted = positions_of_ids(self._stack.module, arguments.get("input_ids"))
            call.longest = call.longest if counted is None else counted.max()
            of_part = parts.positions(padded, main.device)[None]
            cut["position_ids"] = of_part if counted is None else parts.cut(_continued(counted, parts.ranks), 1)
        stack = self._stack.module
        if arguments.get("attention_mask") is None and hasattr(sys.modules.get(type(stack).__module__), MASK_OF_IDS):
            raise ValueError(
                f"{type(stack).__name__} makes its mask from the ids that are not padding, and cp makes it before the cut: "
                "pass attention_mask (and decoder_attention_mask)."
            )
        # A mask that is there tells transformers how many keys there are, and that position_ids are not a sign of packing.
        if "attention_mask" in names and cut.get("attention_mask") is None:
            real = torch.ones(main.shape[0], call.length, dtype=torch.long, device=main.device)
            cut["attention_mask"] = sequence_ops.pad(real, 1, parts.ranks)
        states = arguments.get("encoder_hidden_states")
        if states is None:
            return
        length = getattr(states, _LENGTH, None)
        if length is None:
            raise NotImplementedError(
                f"cp cuts the sequence of {type(self._stack.module).__name__}, and the encoder_hidden_states of this call "
                "do not come from a stack that was cut: its keys would be taken for a part. Give the encoder's input."
            )
        if cut.get("encoder_attention_mask") is None and "encoder_attention_mask" in names:
            real = torch.ones(states.shape[0], length, dtype=torch.long, device=states.device)
            cut["encoder_attention_mask"] = sequence_ops.pad(real, 1, parts.ranks)


def _reads_a_mask(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(module.forward).parameters


def main_input(arguments: dict[str, Any]) -> Tensor | None:
    """Return the tensor that the sequence is read from: ids or embeddings, or a plain model's first matrix of whole
    numbers."""
    for name in _MAIN:
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


def _deepstack(parts: Parts, embeds: Any, where: Tensor | None) -> Any:
    """Return the features of this rank's tokens out of those (visual tokens, D) of the whole batch. where: (B, S)."""
    if embeds is None or where is None:
        return embeds
    number = (where.flatten().long().cumsum(0) - 1).view_as(where)
    mine = parts.cut(number, 1)[parts.cut(where, 1).bool()]
    return [features[mine] for features in embeds]


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
    if not gathers_whole(call) or states.shape[1] != part or getattr(states, _WHOLE, False):
        return None
    whole = call.parts.gather(states, 1)[:, : call.length]
    setattr(whole, _WHOLE, True)
    return exchange(output, states, whole)


def gather_behind(module: nn.Module, args: object, output: object) -> Any:
    """A forward hook of what runs the layers of a stack, where something comes behind it in the stack (a pooler)."""
    call, states = CURRENT.get(), next(iter(tensors_of(output)), None)
    return None if call is None or states is None else _gathered(call, output, states)


def gather_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook of what a stack pools its sequence with: on every rank, it gets the whole."""
    call = CURRENT.get()
    if call is None or call.parts.idle or gathers_whole(call):
        return None
    part = sequence_ops.padded_length(call.length, call.parts.ranks) // call.parts.ranks

    def whole(value: Any) -> Any:
        fits = isinstance(value, Tensor) and value.ndim == 3 and value.shape[1] == part
        return call.parts.gather(value, 1)[:, : call.length] if fits else value

    return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


# Rotary embeddings whose frequencies follow the longest position of their call (longrope, dynamic).
#
# A rank's part has a longest position of its own, and that of padding is longer than any of the sequence. So what makes such
# embeddings is given this rank's positions, none beyond the longest of the whole sequence, and that one behind them.

_POSITIONS = "position_ids"


def reads_the_longest(module: nn.Module) -> bool:
    """Return whether `module` makes something of positions alone, and reads the longest of them."""
    forward = inspect.unwrap(class_of(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or _POSITIONS not in code.co_varnames or any(True for _ in module.parameters()):
        return False
    return rope_follows_length(module) or not {"max", "amax"}.isdisjoint(code.co_names)


class LongestPosition:
    """The hooks of a module for which `reads_the_longest` holds."""

    def __init__(self, module: nn.Module) -> None:
        self._names = tuple(inspect.signature(class_of(module).forward).parameters)[1:]
        self._tokens: list[int | None] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pre-hook."""
        call, arguments = CURRENT.get(), dict(zip(self._names, args)) | kwargs
        positions = arguments.get(_POSITIONS)
        if call is None or call.parts.idle or not isinstance(positions, Tensor):
            self._tokens.append(None)
            return None
        self._tokens.append(positions.shape[-1])
        return (), arguments | {_POSITIONS: _with_longest(positions, call)}

    def after(self, module: nn.Module, args: object, output: object) -> Any:
        """The forward hook, also after an exception."""
        tokens = self._tokens.pop() if self._tokens else None
        if tokens is None or output is None:
            return None

        def own(made: object) -> Any:
            if isinstance(made, tuple):
                return tuple(map(own, made))
            if not isinstance(made, Tensor) or made.ndim < 2 or made.shape[-2] != tokens + 1:
                raise NotImplementedError(
                    f"cp gives {type(module).__name__} the longest position of the whole sequence behind the {tokens} of a "
                    f"part. What it makes of them ({_shape(made)}) has no dim for it before its last. Use cp=1."
                )
            return made.narrow(-2, 0, tokens)

        return own(output)


def _with_longest(positions: Tensor, call: StackCall) -> Tensor:
    if isinstance(call.longest, Tensor):
        longest = call.longest.to(positions)
    else:
        longest = torch.full((), call.longest, dtype=positions.dtype, device=positions.device)
    return torch.cat([positions.minimum(longest), longest.expand(*positions.shape[:-1], 1)], -1)
