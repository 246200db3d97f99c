"""The share of each micro-batch of a pipeline in the loss of the whole batch, by `PipelineParallel.loss_mean`.

No model tells whether its loss is a sum, a mean over rows, or a mean over what counts: its user does. The last stage is
then called with two micro-batches at once. That loss must be what the losses of each alone add up to, and so must its
gradients. Layers are left out of these calls, and hidden states are drawn: the loss is a function of what comes behind the
layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like._util.module_tree import bare_modules
from nemo_like.activation_checkpointing.engine.module_state import ModuleState
from nemo_like.distributed.agreement import gather, gather_objects
from nemo_like.distributed.context.verify_cut import evaluating, put_back
from nemo_like.distributed.pipeline.batches import by_row, cut_batch, joined, marks, size_of
from nemo_like.distributed.pipeline.stage import Stage, StagesOfRank
from nemo_like.losses.model_loss import LABELS
from nemo_like.losses.rows import IGNORED, predicts_next_token
from nemo_like.options import PipelineParallel
from nemo_like.torch_compat import answering_calls
from nemo_like.transformers_compat import model_base

_ITEMS = "num_items_in_batch"
"""The argument by which a model of transformers is given what to divide the sum of its losses by."""
_TOLERANCE, _LOWER = 1e-4, 3e-2
"""Allowed difference of gradients, relative to their norm; the second where something is computed with fewer bits than
float32 has."""


class LossMean:
    """The numbers that the loss of a model is a mean over.

    Raises:
        ValueError: `PipelineParallel.loss_mean` is left out, and the model is none of transformers.
    """

    def __init__(self, model: nn.Module, pp: PipelineParallel) -> None:
        base = model_base()
        kind = type(model).__name__
        if pp.loss_mean is None and not hasattr(model, "loss_function") and not (base and isinstance(model, base)):
            raise ValueError(
                f"pp adds up the losses of micro-batches, and cannot see what the loss of {kind} is a mean over. Write one "
                f"of these, for pp={pp.size}:\n"
                f'  pp=PipelineParallel({pp.size}, loss_mean="tokens")  # over labels that are not {IGNORED}\n'
                f'  pp=PipelineParallel({pp.size}, loss_mean="rows")  # over rows or elements; or "sum"\n'
                f'  pp=PipelineParallel({pp.size}, loss_mean=lambda batch: (batch["ids"] != 0).sum())  # over what counts'
            )
        self.over = "tokens" if pp.loss_mean is None else pp.loss_mean
        self._is_default = pp.loss_mean is None
        self._shifts, self._kind = predicts_next_token(model), kind
        self._calls = 0
        self._compared: set[Hashable] = set()
        self.has_values = True
        """Tensors have values. Without them micro-batches count alike, and nothing is compared."""

    def cut(self, batch: Mapping[str, Any], count: int) -> tuple[list[dict[str, Any]], list[float]]:
        """Cut `batch` into `count` micro-batches, and return each one's share of the loss.

        Rows that are missing are filled up with labels that count for nothing.
        """
        labels = [name for name in LABELS if _are_classes(batch.get(name))] if self.over == "tokens" else []
        parts = cut_batch(batch, count, dict.fromkeys(labels, IGNORED) or None)
        if count == 1 or self._is_sum(batch):
            return parts, [1.0] * count
        if self.over == "rows" or not self.has_values:
            return parts, [1 / count] * count
        weigh = self.over if callable(self.over) else self._labels
        weights = [torch.as_tensor(weigh(part)).detach().double().reshape(()) for part in parts]
        numbers = torch.stack(weights).tolist()
        return parts, [number / (sum(numbers) or 1.0) for number in numbers]

    def _is_sum(self, batch: Mapping[str, Any]) -> bool:
        return self.over == "sum" or (self.over == "tokens" and batch.get(_ITEMS) is not None)

    def _labels(self, microbatch: Mapping[str, Any]) -> Tensor:
        """Return how many labels count, 0-dim."""
        names = [name for name in reversed(LABELS) if isinstance(microbatch.get(name), Tensor)]
        if not names:
            raise ValueError(
                f'PipelineParallel.loss_mean is "tokens", which counts {", ".join(LABELS)}, and the batch has '
                f"{', '.join(microbatch)}. Give labels, or write loss_mean='rows', 'sum' or a function of a micro-batch."
            )
        labels = microbatch[names[0]]
        if self._shifts and names[0] != "shift_labels" and labels.dim() > 1:
            labels = labels[..., 1:]  # the first one belongs to no prediction
        return (labels != IGNORED).sum()

    # --- the comparison -----------------------------------------------------------------------------------------------

    def check(self, pipeline: StagesOfRank, batch: Mapping[str, Any]) -> None:
        """Compare what the stages were given of `batch`, where it shows what no comparison has seen.

        That is in the first call, and where micro-batches first count differently. Where `PipelineParallel.loss_mean` is
        given, also in calls 2, 4, 8 and so on, and where masks, padding or ids differ as never before. A collective of
        all ranks that share a stage.

        Raises:
            ValueError: on every rank: the losses of micro-batches do not add up to that of the batch.
        """
        parts, shares = pipeline.stages[0].forward.microbatches, pipeline.stages[0].forward.shares
        if len(parts) == 1 or not self.has_values:
            return
        pairs = self._pairs(batch, parts, shares)
        empty = not any(shares)
        most, nothing = gather(torch.tensor([len(pairs), empty]), pipeline.groups_of_stage).max(0).values.tolist()
        if nothing:
            raise ValueError(
                "Nothing counts in the batch: its loss gives no gradient. Give labels of which some count."
            )
        if not most:
            return
        off: float | str = 0.0
        failure: Exception | None = None
        if pipeline.stages[-1].slice.is_last:
            last = LastStage(pipeline, pipeline.stages[-1])
            try:
                with last.undisturbed():
                    # FSDP2 gathers in each call, so all ranks of a stage make as many.
                    every = [self._off(last, parts, shares, pair) for pair in (*pairs, *[(0, 1)] * most)[:most]]
                off = max(every) if max(every) > (_LOWER if last.fewer_bits else _TOLERANCE) else 0.0
            except Exception as error:  # noqa: BLE001  (raised below, once the other ranks know)
                off, failure = f"{type(error).__name__}: {error}", error
        answers = [answer for _, answer in gather_objects((dist.get_rank(), off), pipeline.groups)]
        if failure is not None:
            raise failure
        failed = next((answer for answer in answers if isinstance(answer, str)), None)
        if failed is not None:
            raise ValueError(f"The last stage cannot compute the loss. {failed}")
        if any(answers):
            raise ValueError(self._refusal(max(answers)))

    def _refusal(self, off: float) -> str:
        setting = f"loss_mean={self.over!r}" if isinstance(self.over, str) else "loss_mean"
        items = f", or leave {_ITEMS} out" if self.over == "tokens" else ""
        if self.over == "tokens" and not self._shifts:
            shifted = f"lambda batch: (batch['labels'][:, 1:] != {IGNORED}).sum()"
            items += f". A model that shifts its labels needs a function: {shifted}"
        return (
            f"pp cannot add up the losses of this {self._kind}'s micro-batches under {setting}: the loss of two in one "
            f"call, or its gradient, is off by {off:.1e} of its size. Write what the loss is a mean over, with "
            f"PipelineParallel(loss_mean='tokens' | 'rows' | 'sum' | a function of a micro-batch){items}. A loss of terms "
            "that are means over different things takes strategy='fsdp2' with tp or cp in place of pp."
        )

    def _pairs(
        self, batch: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], shares: Sequence[float]
    ) -> list[tuple[int, int]]:
        """Return the two micro-batches to compare for each thing that no comparison has seen."""
        self._calls += 1
        news: dict[Hashable, Sequence[float]] = {("names", frozenset(batch)): shares}
        if len(set(shares)) > 1:
            news["shares", all(shares)] = shares
        if not self._is_default:
            if self._calls & (self._calls - 1) == 0:
                news["calls", self._calls] = shares
            news |= {key: numbers for key, numbers in _counts(batch, parts).items() if len(set(numbers)) > 1}
        new = [numbers for key, numbers in news.items() if key not in self._compared]
        self._compared |= news.keys()
        pairs = list(dict.fromkeys(map(_most_and_least, new)))
        ids = {} if self._is_default else _ids(batch, parts)
        hidden = [numbers for key, numbers in ids.items() if key not in self._compared and not _shown(numbers, pairs)]
        if hidden:  # one more pair in a call: the others come in later ones
            pairs.append(_most_and_least(max(hidden, key=lambda numbers: max(numbers) - min(numbers))))
        self._compared |= {key for key, numbers in ids.items() if _shown(numbers, pairs)}
        return pairs

    def _off(
        self, last: LastStage, parts: Sequence[Mapping[str, Any]], shares: Sequence[float], pair: tuple[int, int]
    ) -> float:
        """By which part of its size the loss of two micro-batches, or its gradient, is off what both add up to."""
        first, second = (last.usable(parts[number]) for number in pair)
        weights = [shares[number] for number in pair]
        if not self._is_sum(first):
            weights = [share / (sum(weights) or 1.0) for share in weights]
        rows, tokens = size_of(first)
        both = joined(first, second)
        states, places = last.states(first, both, rows, tokens)
        whole, loss = last.gradients(both, states)
        halves = zip(*(_halves(tensor, place) for tensor, place in zip(states, places)))
        singles, losses = [], []
        for part, half, share in zip((first, second), halves, weights):
            gradients, value = last.gradients(part, half)
            singles.append([gradient * share for gradient in gradients])
            losses.append(value * share if share else value.nan_to_num() * 0.0)  # a mean over nothing
        if not any(weights):
            return 0.0
        norm = _norm(whole)
        off = [
            _norm([one - other]) / max(_norm([other]), 1e-3 * norm, 1e-30)
            for wanted, place, *of_parts in zip(whole, places, *singles)
            for one, other in _facing(of_parts, wanted, place)
        ]
        # A term that gives the hidden states no gradient shows in the loss alone.
        off.append(_norm([sum(losses) - loss]) / max(_norm([loss]), *(_norm([value]) for value in losses), 1e-30))
        return max(number if number == number else float("inf") for number in off)


def _are_classes(labels: object) -> bool:
    return isinstance(labels, Tensor) and not labels.is_floating_point()


def _counts(batch: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> dict[Hashable, list[float]]:
    """Return what a loss may leave out, counted in each micro-batch: entries of masks, and numbers that may be padding."""
    counts: dict[Hashable, list[Tensor]] = {}
    for name, value in by_row(batch).items():
        if value.dtype == torch.bool or (value.is_floating_point() and value.dim() == 2):
            counts[name] = [part[name].double().sum() for part in parts]
    for name, number in marks(batch):
        counts[name, number] = [(part[name] == number).double().sum() for part in parts]
    numbers = torch.stack([count.cpu() for row in counts.values() for count in row]).view(-1, len(parts)).tolist()
    return dict(zip(counts, numbers))


def _ids(batch: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> dict[Hashable, list[float]]:
    """Return how often each id is in each micro-batch, of those that differ by more than the tolerance: a separator."""
    counts: dict[Hashable, list[float]] = {}
    for name, value in by_row(batch).items():
        if value.dim() != 2 or value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
            continue
        ids, places = torch.cat([part[name].flatten() for part in parts]).unique(return_inverse=True)
        each = torch.stack([part.bincount(minlength=len(ids)) for part in places.chunk(len(parts))])
        differ = each.amax(0) - each.amin(0) > _TOLERANCE * places.numel() / len(parts)
        counts |= {(name, number): row for number, row in zip(ids[differ].tolist(), each.T[differ].tolist())}
    return counts


def _shown(numbers: Sequence[float], pairs: Collection[tuple[int, int]]) -> bool:
    """Return whether a comparison of two of these micro-batches shows what has these `numbers` in them."""
    return any(numbers[one] != numbers[other] for one, other in pairs)


def _most_and_least(numbers: Sequence[float]) -> tuple[int, int]:
    order = sorted(range(len(numbers)), key=numbers.__getitem__, reverse=True)
    return order[0], order[-1]


def _halves(tensor: Tensor, place: int | None) -> Sequence[Tensor]:
    """Return what each of two micro-batches has of `tensor`."""
    return (tensor, tensor) if place is None else tensor.chunk(2, place)


def _facing(parts: Sequence[Tensor], whole: Tensor, place: int | None) -> list[tuple[Tensor, Tensor]]:
    """The gradients of both micro-batches, each with the one that it has to be."""
    if place is None:
        return [(parts[0] + parts[1], whole)]
    return list(zip(parts, whole.chunk(2, place)))


def _norm(tensors: Collection[Tensor]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors)) ** 0.5


class LastStage:
    """The last stage, called by itself: without its layers, with hidden states that are drawn."""

    def __init__(self, pipeline: StagesOfRank, stage: Stage) -> None:
        self._pipeline, self._stage = pipeline, stage
        self._drawn = torch.Generator().manual_seed(0)
        exact = torch.get_float32_matmul_precision() == "highest"
        self.fewer_bits = not exact or any(map(_is_low, stage.module.parameters()))
        """Something was computed with fewer bits than float32 has."""

    @staticmethod
    def usable(microbatch: Mapping[str, Any]) -> dict[str, Any]:
        """`microbatch` with copies of what was made in inference mode, which no gradient takes."""
        return {k: v.clone() if isinstance(v, Tensor) and v.is_inference() else v for k, v in microbatch.items()}

    def states(
        self, first: Mapping[str, Any], both: Mapping[str, Any], rows: int, tokens: int
    ) -> tuple[list[Tensor], list[int | None]]:
        """Draw what the stage before might send for `both`; and the dimension along which two micro-batches have it."""
        pipeline, index = self._pipeline, self._stage.slice.index - 1
        states, places = [], []
        # Whole sequences, as layers give them to the loss: none of them runs.
        tokens *= pipeline.parts.sent_by
        sent = zip(pipeline.parts.sent(index, both, 2 * rows, tokens), pipeline.parts.sent(index, first, rows, tokens))
        for form, half in sent:
            drawn = torch.randn(form.shape, generator=self._drawn).to(pipeline.device, form.dtype)
            states.append(drawn)
            places.append(next((dim for dim, (a, b) in enumerate(zip(form.shape, half.shape)) if a != b), None))
        return states, places

    def gradients(self, microbatch: Mapping[str, Any], states: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Compute the gradients of the loss of `microbatch` with respect to the hidden states, and the loss, 0-dim."""
        forward = self._stage.forward
        before = forward.microbatches, forward.shares
        forward.microbatches, forward.shares = [microbatch], [1.0]
        leaves = [state.detach().requires_grad_() for state in states]
        scale = 2.0 ** min(14, leaves[0][..., 0].numel().bit_length())  # or float16 has no gradients of a mean
        autocast = forward.call.register_forward_pre_hook(self._note_autocast)
        try:
            with put_back(self._stage.module):  # or a schedule in the model would go on
                loss = self._stage.module(*leaves, microbatch=torch.tensor([0])).sum()
            inputs = torch.autograd.grad(loss * scale, leaves, allow_unused=True) if loss.requires_grad else leaves
        finally:
            autocast.remove()
            forward.microbatches, forward.shares = before
        self.fewer_bits |= any(map(_is_low, (*leaves, loss)))
        if not loss.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves], _whole(loss)
        grads = (torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, inputs))
        return [(grad.float() if _is_low(grad) else grad) / scale for grad in grads], _whole(loss)

    def _note_autocast(self, *_: object) -> None:
        self.fewer_bits |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within it, the last stage is called without its layers and without dropout; afterwards it is as it was."""
        pipeline, stage = self._pipeline, self._stage
        modules = dict(bare_modules(stage.module))
        training = stage.module.training
        device = pipeline.device
        devices = [] if device.type == "cpu" else [device]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.random.fork_rng(devices, device_type=device.type))
            ModuleState(stage.module).restore(stack)
            stack.enter_context(evaluating(stage.module))
            stage.module.training = training  # a model may return a loss in training alone
            for index in stage.slice.layers:
                passing = pipeline.parts.passing(index)
                if passing is not None:
                    stack.enter_context(answering_calls(modules[pipeline.parts.layers[index]], passing))
            for parts in pipeline.sequence_parts():
                stack.callback(setattr, parts, "verifying", parts.verifying)
                parts.verifying = "whole"
            yield


def _whole(loss: Tensor) -> Tensor:
    value = loss.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).double()


def _is_low(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() < 4
