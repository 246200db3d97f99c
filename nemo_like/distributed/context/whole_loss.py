"""One loss for all parts of a sequence: labels shifted before the cut, normalised by all counted tokens.

A cross entropy of labels (B, S) or of the next labels, a mean or a sum over ``num_items_in_batch``, is computed by the model
as always, from its part of the logits and of the labels. While it runs, the targets of its cross entropy are exchanged for
the right ones: the label of a part's last token is another rank's first. They are compared as whole numbers in every call;
the divisor of a mean is counted on the whole labels, which every rank has. The parts are summed over the ranks.

With labels of another shape (a class per row, where an answer starts), or ``loss_mean="rows"``, the modules behind the
layers get whole sequences on every rank. Any other loss is summed as `ContextParallel.loss_mean` describes it, or
refused.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like._util.module_tree import base_model
from nemo_like.distributed.context.parts import Parts, exchange, main_input, tensors_of
from nemo_like.distributed.context.sequence_ops import find_group, sum_parts
from nemo_like.distributed.context.verify_cut import verify_cut
from nemo_like.losses.model_loss import ITEMS, LABELS
from nemo_like.losses.rows import IGNORED, predicts_next_token
from nemo_like.torch_compat import stop_unless
from nemo_like.transformers_compat import LOGITS_TO_KEEP, given_cache, parameter_names

LossMean = str | Callable[[dict[str, Any]], Any] | None  # `ContextParallel.loss_mean`.
_WAYS_OUT = (
    "Turn off the terms added to the cross entropy of labels, or write ContextParallel(loss_mean=...): 'tokens', 'sum' "
    "or a function of a part, or 'rows' (whole sequences on every rank). Or compute it outside, from shard_sequence's "
    "labels."
)

# Two messages of `stop_unless`, which are shorter than 250 characters.
OTHER_LOSS = (
    "cp sums a model's cross entropy, and its loss is another one now. Turn off the terms added to it, or write "
    "ContextParallel(loss_mean=...), or compute the loss outside, from shard_sequence's labels."
)
OTHER_TARGETS = (
    "cp shifts labels before it cuts them, and this model's cross entropy has other targets than its labels or the labels "
    "of the next tokens. Compute the loss outside, from shard_sequence's labels."
)


class RootHooks:
    """The hooks of a whole model.

    Args:
        call: whose hooks these are; another than `model`, where this is a pipeline's stage.
        is_stack: it is the stack.
    """

    def __init__(
        self, model: nn.Module, parts: Parts, call: nn.Module, loss_mean: LossMean = None, is_stack: bool = False
    ) -> None:
        self.model, self.parts, self.loss_mean = model, parts, loss_mean
        self._whole, self._is_stack = call is model, is_stack
        self._open: list[_Loss | None] = []
        self._before: list[tuple[bool, bool]] = []
        self._of_rows = loss_mean == "rows"  # Outputs are made of whole rows: so is that of a call without labels.
        # By name of labels, once a call has shown it: the model's own loss shifts them by one.
        self.shifts_by_name: dict[str, bool] = {}
        # Number of the sum that the loss is (`_Loss._is_sum`), once a call has shown it.
        self.summed: int | None = None
        self._compared = False
        self._names = parameter_names(base_model(call).forward)

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pre-hook."""
        arguments = dict(zip(self._names, args)) | kwargs
        self._before.append((self.parts.idle, self.parts.whole_head))
        self._open.append(None)
        cached = given_cache((), (), arguments) is not None
        if cached and torch.is_grad_enabled() and self.model.training:
            raise ValueError(
                "cp cuts sequences, and this call brings a key/value cache (or a prefix) of whole ones in training: use "
                "cp=1, or train without it."
            )
        self.parts.idle = cached or self.parts.verifying == "whole"
        if self.parts.idle:
            return None
        if arguments.get("return_dict") is False or arguments.get(LOGITS_TO_KEEP) not in (None, 0):
            raise NotImplementedError(
                f"cp cuts the sequence: call the model without return_dict=False and {LOGITS_TO_KEEP}; its outputs are this "
                "rank's part."
            )
        self._compare(arguments)
        labels, of_rows = self._labels(arguments)
        self._of_rows |= of_rows
        of_rows |= (self.loss_mean == "rows") if labels else (self._of_rows and self._whole)
        self.parts.whole_head = of_rows and not self._is_stack
        replaced = self._with_whole_gradients(arguments)
        if labels and not self.parts.whole_head:
            self._open[-1] = _Loss(self, labels, arguments)
            replaced |= {name: self.parts.cut(arguments[name], 1, IGNORED) for name in labels}
        if replaced and len(args) > len(self._names):
            raise NotImplementedError(
                f"cp cannot tell the names of the {len(args) - len(self._names)} last positional arguments: give them "
                "by keyword."
            )
        if self._open[-1] is not None:
            # In torch's module, for all threads. A function mode would be this thread's alone, and active for every
            # function of all layers, whose compiled graphs it breaks, and again for their recomputation.
            F.cross_entropy = self._open[-1].cross_entropy
        return ((), arguments | replaced) if replaced else None

    def after(self, model: nn.Module, args: object, output: object) -> Any:
        """The forward hook, also after an exception."""
        if not self._open:
            return None
        loss = self._open.pop()
        self.parts.idle, self.parts.whole_head = self._before.pop()
        if loss is None:
            return None
        F.cross_entropy = loss.replaced
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
        of_tokens = [
            name
            for name in LABELS
            if name in named
            and tensors[name].ndim > 1
            and not tensors[name].is_floating_point()
            and (main is None or tensors[name].shape[:2] == main.shape[:2])
        ]
        return of_tokens, len(of_tokens) < len(named)

    def _compare(self, arguments: dict[str, Any]) -> None:
        """Compare the first call with whole sequences."""
        main = main_input(arguments)
        if not (self.parts.planning or self.parts.verifying or main is None or self._compared):
            self._compared = True
            if self._whole:  # a pipeline compares all its stages
                verify_cut(self.model, self.parts, arguments, main)

    def agree(self, *seen: bool, device: torch.device) -> list[bool]:
        """Return which of `seen` are true on all ranks: one of them may have labels that tell nothing."""
        if self.parts.planning:
            return [True] * len(seen)
        votes = torch.tensor(seen, dtype=torch.int32, device=device)
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=find_group(self.parts.group))
        return [bool(vote) for vote in votes.tolist()]


class _Loss:
    """The loss of one call.

    Args:
        names: of the labels of tokens among the `arguments`.
    """

    def __init__(self, hooks: RootHooks, names: list[str], arguments: dict[str, Any]) -> None:
        self._hooks, self._arguments = hooks, arguments
        # Where the caller has shifted them, the model's loss reads those alone.
        self._shifted = "shift_labels" in names
        self._name = "shift_labels" if self._shifted else names[0]
        self.whole: Tensor = arguments[self._name]
        self._labels = hooks.parts.cut(self.whole, 1, IGNORED)
        self._terms: list[Tensor] = []
        # The function whose place `cross_entropy` takes while the model runs.
        self.replaced: Callable[..., Tensor] = F.cross_entropy

    def cross_entropy(
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
        """`F.cross_entropy` of this rank's part: its term of the sum over the whole sequences."""
        described = self._hooks.loss_mean is not None
        whole = self._targets(target, ignore_index)
        mine = self._hooks.parts.cut(whole, 1, ignore_index).reshape(target.shape)
        if reduction not in ("mean", "sum") and not described:
            raise NotImplementedError(
                f"cp sums a model's loss over ranks, and this model calls cross entropy with reduction={reduction!r}: "
                "its use of single losses is not known. " + _WAYS_OUT
            )
        # Under a function mode, as `torch.set_default_device` is one, torch looks a function that runs up by its name again.
        F.cross_entropy = self.replaced
        try:
            total = self.replaced(
                input,
                mine,
                weight,
                ignore_index=ignore_index,
                reduction=reduction if described else "sum",
                label_smoothing=label_smoothing,
            )
        finally:
            F.cross_entropy = self.cross_entropy
        if reduction == "mean" and not described:
            counts = whole != ignore_index
            total = total / (counts.sum() if weight is None else (weight[whole.where(counts, 0)] * counts).sum())
        self._terms.append(total)
        return total

    def _targets(self, target: Tensor, ignore_index: int) -> Tensor:
        """Return the targets of the whole sequences, (B, S): the labels, or the labels of the next tokens, as this
        model has them."""
        hooks = self._hooks
        if target.numel() != self._labels.numel():
            raise NotImplementedError(
                f"cp cuts labels {tuple(self.whole.shape)}, and this model's cross entropy has {target.numel()} targets for "
                f"the {self._labels.numel()} tokens of a part: it drops or picks tokens by itself. Compute the loss "
                "outside, from shard_sequence's labels."
            )

        def equals(shifts: bool) -> Tensor:
            form = _next(self._labels, IGNORED) if shifts else self._labels
            return (target.reshape(-1) == form.reshape(-1)).all()

        known = hooks.shifts_by_name.get(self._name)
        if known is not None and not hooks.parts.planning:
            stop_unless(equals(known), OTHER_TARGETS)
            return _next(self.whole, ignore_index) if known else self.whole
        plain, shifts = (hooks.parts.planning or bool(equals(each)) for each in (False, True))
        if self._shifted and plain:
            hooks.shifts_by_name[self._name] = False
            return self.whole
        plain, shifts = hooks.agree(plain, shifts, device=target.device)
        if plain != shifts:
            hooks.shifts_by_name[self._name] = shifts
        if not (plain or shifts):
            raise NotImplementedError(OTHER_TARGETS)
        # Where no call has shown which of the two, no label counts on any rank, and both are the same.
        return self.whole if plain else _next(self.whole, ignore_index)

    def put_sum(self, output: object) -> Any:
        """`output` with the loss of all parts in the place of this part's."""
        parts, described = self._hooks.parts, self._hooks.loss_mean is not None
        loss = output.get("loss") if isinstance(output, dict) else None
        if loss is None:
            scalars = [each for each in tensors_of(output) if each.ndim == 0]
            loss = next((scalar for scalar in scalars if described or any(scalar is one for one in self._terms)), None)
        sums = described or (parts.planning and bool(self._terms)) or self._is_sum(loss)
        if parts.verifying:  # so that no rank waits for one that raises
            (sums,) = self._hooks.agree(sums and loss is not None, device=self.whole.device)
        if loss is None or not sums:
            raise NotImplementedError(
                f"cp sums a model's cross entropy over ranks, and the loss of this {type(self._hooks.model).__name__} "
                + ("has other terms in addition (an auxiliary loss of a router?). " if self._terms else "is none. ")
                + _WAYS_OUT
            )
        # Of logits that tp has cut it is a DTensor, whole on every rank.
        part = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return exchange(output, loss, sum_parts(self._times_share(part), parts.ranks, parts.group))

    def _is_sum(self, loss: Tensor | None) -> bool:
        """Return whether `loss` is made of this call's cross entropies, divided by ``num_items_in_batch`` or not."""
        if loss is None or not self._terms:
            return False
        if any(loss is term for term in self._terms):
            return True
        total, items = torch.stack([term.detach() for term in self._terms]).sum(), self._arguments.get(ITEMS)
        candidates = [total] if items is None else [total, total / items]

        def is_close(one: Tensor) -> Tensor:
            return torch.isclose(loss.detach().float(), one.float(), rtol=1e-5, equal_nan=True).all()

        summed = self._hooks.summed
        if summed is None or summed >= len(candidates):
            self._hooks.summed = next((number for number, one in enumerate(candidates) if is_close(one)), None)
            return self._hooks.summed is not None
        stop_unless(is_close(candidates[summed]), OTHER_LOSS)
        return True

    # --- `ContextParallel.loss_mean` ----------------------------------------------------------------------------------

    def _times_share(self, loss: Tensor) -> Tensor:
        """Return the part of `loss`, of this part of the sequence, in the loss of all."""
        parts, over = self._hooks.parts, self._hooks.loss_mean
        if over is None or over == "sum" or (over == "tokens" and self._arguments.get(ITEMS) is not None):
            return loss
        if parts.planning:
            return loss / parts.ranks
        mine = self._counted_tokens() if not callable(over) else torch.as_tensor(over(self._part()))
        mine = mine.detach().to(loss.device, torch.float64).reshape(())
        share = (mine / sum_parts(mine, parts.ranks, parts.group)).item()
        return loss * share if share else loss.nan_to_num() * 0.0  # a mean over nothing

    def _counted_tokens(self) -> Tensor:
        """Return how many targets of this part count."""
        shifts = self._hooks.shifts_by_name.get(self._name)
        shifts = predicts_next_token(self._hooks.model) if shifts is None else shifts
        targets = _next(self.whole, IGNORED) if shifts and not self._shifted else self.whole
        return (self._hooks.parts.cut(targets, 1, IGNORED) != IGNORED).sum()

    def _part(self) -> dict[str, Any]:
        """Return the call's arguments with this rank's part of whatever is as long as the labels."""
        length = self.whole.shape[1]
        return {
            name: self._hooks.parts.cut(value, 1, IGNORED if name in LABELS else 0)
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == length
            else value
            for name, value in self._arguments.items()
        }


def _next(labels: Tensor, ignored: int) -> Tensor:
    """Return the labels (B, S) of the next tokens."""
    return F.pad(labels, (0, 1), value=ignored)[..., 1:]
