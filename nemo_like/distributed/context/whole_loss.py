"""One loss for all parts of a sequence: labels shifted before the cut, normalised by all counted tokens.

The model computes its loss as it always does, from its part of the logits and of the labels. While it runs, the targets
of its cross entropy are exchanged for the right ones: the label of a part's last token is another rank's first. What a
"mean" divides by is counted on the whole labels, which every rank has. The parts are summed over the ranks.

Some losses are not of tokens (a class per row, where an answer starts), and some outputs are made of a row. They are
computed from whole sequences on every rank: what comes behind the layers is given them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like._util.module_tree import base_model
from nemo_like.distributed.context.parts import Parts
from nemo_like.distributed.context.sequence_ops import find_group, sum_parts
from nemo_like.distributed.context.stack_calls import exchange, main_input, tensors_of
from nemo_like.distributed.context.verify_cut import sequence_length, verify_cut, wanted
from nemo_like.layers.structure import class_of
from nemo_like.losses.model_loss import LABELS
from nemo_like.losses.rows import IGNORED
from nemo_like.transformers_compat import LOGITS_TO_KEEP, PREPARE_DECODER, SHIFT_RIGHT, given_cache, parameter_names

_CHECKED = (1, 8)
"""The calls of each mode, training and evaluation, that are compared: the first, and a later one with other data."""


class RootHooks:
    """The hooks of a whole model."""

    def __init__(self, model: nn.Module, parts: Parts, call: nn.Module, is_stack: bool = False) -> None:
        """call: whose hooks these are; another than `model`, where this is a pipeline's stage. is_stack: it is a stack
        itself."""
        self._model, self.parts = model, parts
        self._whole, self._is_stack = call is model, is_stack
        self._open: list[_Loss | None] = []
        self._before: list[tuple[bool, bool]] = []
        self._pools = self._other_loss = False
        """The first call has shown that outputs are made of whole rows, or its loss not of tokens."""
        self._watched = WatchedLosses()
        self.shifts: bool | None = None
        """The model's own loss shifts its labels by one; None: no call has shown it yet."""
        self._calls = {True: 0, False: 0}
        """In training and in evaluation, until no more are compared."""
        self._names = parameter_names(base_model(call).forward)
        config = getattr(base_model(model), "config", None)
        self._decodes = "decoder_input_ids" in self._names and bool(getattr(config, "is_encoder_decoder", False))

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = self._names
        arguments = dict(zip(names, args)) | kwargs
        self._before.append((self.parts.idle, self.parts.whole_head))
        self._open.append(None)
        self.parts.idle = given_cache((), (), arguments) is not None
        if self.parts.idle:
            self._refuse_cache_in_training(arguments)
        if self.parts.verifying == "whole":
            self.parts.idle = True
            self._watched = WatchedLosses()
            self._watched.__enter__()
        if self.parts.idle:
            return None
        if arguments.get("return_dict") is False or arguments.get(LOGITS_TO_KEEP) not in (None, 0):
            raise NotImplementedError(
                f"cp cuts the sequence: call the model without return_dict=False and {LOGITS_TO_KEEP}; its outputs are this "
                "rank's part."
            )
        self._check_call(arguments)
        names_given, others = self._labels(arguments)
        self.parts.whole_head = not self._is_stack and (others or self._other_loss or (self._pools and not names_given))
        rest, replaced = args[len(names) :], self._with_whole_gradients(arguments)
        if rest and (replaced or (names_given and not self.parts.whole_head)):
            raise NotImplementedError(f"cp cannot tell what the {len(rest)} last positional arguments are; name them.")
        arguments |= replaced
        if self.parts.whole_head or not names_given:
            return ((), arguments) if replaced else None
        # Where the caller has shifted them, the model's loss reads those alone.
        name = "shift_labels" if "shift_labels" in names_given else names_given[0]
        labels: Tensor = arguments[name]
        self._make_decoder_inputs(arguments, labels)
        loss = _Loss(self, labels, arguments.get("num_items_in_batch"), shifted=name == "shift_labels")
        arguments |= {other: self.parts.cut(arguments[other], 1, IGNORED) for other in names_given} | {
            name: loss.labels
        }
        self._open[-1] = loss
        loss.__enter__()
        return (), arguments

    def after(self, model: nn.Module, args: object, output: object) -> Any:
        if not self._open:
            return None
        loss = self._open.pop()
        if self.parts.verifying == "whole":
            self._watched.__exit__()
        self.parts.idle, self.parts.whole_head = self._before.pop()
        if loss is None:
            return None
        loss.__exit__()
        return None if output is None else loss.put_sum(output)

    def _with_whole_gradients(self, arguments: dict[str, Any]) -> dict[str, Tensor]:
        """The arguments that the caller takes gradients of (embeddings of its own): each rank gets the whole one, not
        that of its part, which counts as often as there are ranks."""
        if not torch.is_grad_enabled() or self.parts.planning or not self._whole:
            return {}
        whole = {}
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.requires_grad:
                whole[name] = value.view_as(value)
                whole[name].register_hook(
                    lambda grad: sum_parts(grad, self.parts.ranks, self.parts.group) / self.parts.ranks
                )
        return whole

    def _labels(self, arguments: dict[str, Any]) -> tuple[list[str], bool]:
        """The names of labels of tokens, and whether there are others (of rows; real numbers; places in the sequence)."""
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        places = ("start_positions", "end_positions")
        named = [name for name in tensors if name in LABELS or "label" in name or name in places]
        main = main_input(arguments)
        read = None if main is None else main.shape[: 1 if self._decodes else 2]  # a decoder has tokens of its own
        of_tokens = [
            name
            for name in LABELS
            if name in named
            and (labels := tensors[name]).ndim > 1
            and not labels.is_floating_point()
            and (read is None or labels.shape[: len(read)] == read)
        ]
        return of_tokens, len(of_tokens) < len(named)

    def _refuse_cache_in_training(self, arguments: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and self._model.training:
            raise ValueError(
                "cp cuts sequences, and this call brings a key/value cache (or a prefix) of whole ones in training: use "
                "cp=1, or train without it."
            )

    def _check_call(self, arguments: dict[str, Any]) -> None:
        """In the calls of `_CHECKED`: what would give a wrong loss silently."""
        main, mode = main_input(arguments), self._model.training
        if self.parts.planning or self.parts.verifying or main is None or self._calls[mode] >= max(_CHECKED):
            return
        self._calls[mode] += 1
        tokens = wanted(sequence_length(main), self.parts.ranks)
        if self._calls[mode] in _CHECKED and tokens is not None and self._whole:  # a pipeline compares all its stages
            verify_cut(self._model, self.parts, arguments, tokens, self._look)

    def _look(self, arguments: dict[str, Any], output: object, length: int) -> None:
        """At what the model gives for whole sequences of `length` tokens: outputs without a sequence, or a loss that is no
        cross entropy of labels of tokens."""
        of_tokens, _ = self._labels(arguments)
        if not of_tokens:
            floating = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
            self._pools = any(tensor.ndim < 2 or tensor.shape[1] != length for tensor in floating)
            return
        loss = next((tensor for tensor in tensors_of(output) if tensor.ndim == 0), None)
        labels = arguments["shift_labels" if "shift_labels" in of_tokens else of_tokens[0]]
        self._other_loss = loss is not None and not self._watched.make(
            loss, labels, arguments.get("num_items_in_batch")
        )

    def _make_decoder_inputs(self, arguments: dict[str, Any], labels: Tensor) -> None:
        """Make the decoder's input from whole labels, for an encoder-decoder that makes it from its labels."""
        has_decoder_inputs = (
            arguments.get("decoder_input_ids") is not None or arguments.get("decoder_inputs_embeds") is not None
        )
        if not self._decodes or has_decoder_inputs:
            return
        model: Any = base_model(self._model)
        prepare = getattr(model, PREPARE_DECODER, None)
        shift = getattr(sys.modules.get(class_of(model).__module__), SHIFT_RIGHT, None)
        if prepare is not None:
            arguments["decoder_input_ids"] = prepare(labels)
        elif shift is not None:
            start = model.config.decoder_start_token_id
            arguments["decoder_input_ids"] = shift(labels, model.config.pad_token_id, start)
        else:
            raise NotImplementedError(
                f"cp cuts labels, and how {class_of(model).__name__} makes its decoder's input of them is not known: pass "
                "decoder_input_ids."
            )

    def agree(self, plain: bool, shifted: bool, target: Tensor) -> tuple[bool, bool]:
        """Return what all ranks have seen: one of them may have labels that tell nothing."""
        if self.parts.planning:
            return True, True
        seen = torch.tensor([plain, shifted], dtype=torch.int32, device=target.device)
        dist.all_reduce(seen, dist.ReduceOp.MIN, group=find_group(self.parts.group))
        return bool(seen[0]), bool(seen[1])


@contextmanager
def _put_back(function: Callable[..., Tensor]) -> Iterator[None]:
    """Within it, `function` is torch's cross entropy again, and then what was.

    Under a function mode, as `torch.set_default_device` is one, torch looks a function that runs up by its name again.
    """
    replaced = F.cross_entropy
    F.cross_entropy = function
    try:
        yield
    finally:
        F.cross_entropy = replaced


def _counted(target: Tensor, ignore_index: int, weight: Tensor | None) -> Tensor:
    """The divisor of a mean cross entropy: how many targets count, or the sum of their weights; 0-dim."""
    counts = target != ignore_index
    return counts.sum() if weight is None else (weight[target.where(counts, 0)] * counts).sum()


class _Loss:
    """The loss of one call."""

    def __init__(self, hooks: RootHooks, whole: Tensor, items: object, shifted: bool = False) -> None:
        """shifted: the labels are those of the next tokens already."""
        self.hooks, self.whole, self.items, self.shifted = hooks, whole, items, shifted
        self.labels = hooks.parts.cut(whole, 1, IGNORED)
        self.found: list[Tensor] = []
        self._before: Callable[..., Tensor] = F.cross_entropy

    def __enter__(self) -> None:
        self._before = F.cross_entropy
        F.cross_entropy = self._cross_entropy

    def __exit__(self) -> None:
        F.cross_entropy = self._before

    def _cross_entropy(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: object = None,
        ignore_index: int = IGNORED,
        reduce: object = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        whole = self._targets(target, ignore_index)
        mine = self.hooks.parts.cut(whole, 1, ignore_index).reshape(target.shape)
        if reduction not in ("mean", "sum"):
            raise NotImplementedError(
                f"cp sums a model's loss over ranks, and this model calls cross entropy with reduction={reduction!r}: "
                "what it does with single losses is not known. Compute the loss outside, from shard_sequence's labels."
            )
        with _put_back(self._before):
            total = self._before(
                input, mine, weight, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
            )
        if reduction == "mean":
            total = total / _counted(whole, ignore_index, weight)
        self.found.append(total)
        return total

    def _targets(self, target: Tensor, ignore_index: int) -> Tensor:
        """Return the targets of the whole sequences, (B, S): the labels, or the labels of the next tokens, as this
        model has them."""
        shifted = F.pad(self.labels, (0, 1), value=IGNORED)[..., 1:]
        hooks = self.hooks
        if target.numel() != self.labels.numel():
            raise NotImplementedError(
                f"cp cuts labels {tuple(self.whole.shape)}, and this model's cross entropy has {target.numel()} targets for "
                f"the {self.labels.numel()} tokens of a part: it drops or picks tokens by itself. Compute the loss outside, "
                "from shard_sequence's labels."
            )
        flat = target.reshape(-1)
        plain, shifts = True, True
        if not hooks.parts.planning:
            plain, shifts = torch.equal(flat, self.labels.reshape(-1)), torch.equal(flat, shifted.reshape(-1))
        if self.shifted and plain:
            return self.whole
        if hooks.shifts is None:
            plain, shifts = hooks.agree(plain, shifts, target)
            if plain != shifts:
                hooks.shifts = shifts
        if not (plain if not hooks.shifts else shifts):
            raise NotImplementedError(
                "cp shifts labels before it cuts them, and this model's cross entropy has other targets than its labels or "
                "the labels of the next tokens. Compute the loss outside, from shard_sequence's labels."
            )
        # Where no call has shown which of the two, no label counts on any rank, and both are the same.
        return F.pad(self.whole, (0, 1), value=ignore_index)[..., 1:] if hooks.shifts else self.whole

    def put_sum(self, output: object) -> Any:
        """`output` with the loss of all parts in the place of this part's."""
        parts = self.hooks.parts
        loss = output.get("loss") if isinstance(output, dict) else None
        if loss is None:
            loss = next((item for item in tensors_of(output) if any(item is one for one in self.found)), None)
        if loss is None or not self.found or not self._is_found(loss):
            raise NotImplementedError(
                f"cp sums a model's cross entropy over ranks, and the loss of this {type(self.hooks._model).__name__} "
                + (
                    "has other terms in addition (an auxiliary loss of a router?). Turn them off, or compute"
                    if self.found
                    else "is none. Compute"
                )
                + " the loss outside, from shard_sequence's labels."
            )
        part = (
            loss.full_tensor() if isinstance(loss, DTensor) else loss
        )  # of logits that tp has cut: whole on every rank
        return exchange(output, loss, sum_parts(part, parts.ranks, parts.group))

    def _is_found(self, loss: Tensor) -> bool:
        return self.hooks.parts.planning or _is_sum(loss, self.found, self.items)


def _is_sum(loss: Tensor, terms: list[Tensor], items: Any) -> bool:
    """Return whether `loss` is made of cross entropies `terms`, divided by the number of `items` or not."""
    if any(loss is term for term in terms):
        return True
    total = torch.stack([term.detach() for term in terms]).sum()
    candidates = [total] if items is None else [total, total / items]
    return any(torch.allclose(loss.detach().float(), one.float(), rtol=1e-5, equal_nan=True) for one in candidates)


class WatchedLosses:
    """Watches which cross entropies are computed, and of what."""

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, int]] = []
        self._before: Callable[..., Tensor] = F.cross_entropy

    def __enter__(self) -> None:
        self._before = F.cross_entropy
        F.cross_entropy = self._cross_entropy

    def __exit__(self, *error: object) -> None:
        F.cross_entropy = self._before

    def _cross_entropy(self, input: Tensor, target: Tensor, *args: object, **kwargs: object) -> Tensor:
        with _put_back(self._before):
            loss = self._before(input, target, *args, **kwargs)
        self._found.append((loss, target.numel()))
        return loss

    def make(self, loss: Tensor, labels: Tensor, items: object) -> bool:
        """Return whether `loss` is made of the losses that were watched, each of a target for each of `labels`."""
        if not self._found or any(count != labels.numel() or term.ndim for term, count in self._found):
            return False
        return _is_sum(loss, [term for term, _ in self._found], items)
