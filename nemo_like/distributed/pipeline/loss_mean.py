"""The share of each micro-batch of a pipeline in the loss of the whole batch, by `PipelineParallel.loss_mean`.

No model tells whether its loss is a sum, a mean over rows, or a mean over labels that count: its user does. The last
stage is then called with two micro-batches at once. That loss must be the sum of the losses of each alone, and so must
its gradients. Layers are left out of these calls, and hidden states are drawn: the loss is a function of the modules
behind the layers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like._util.device_work import send
from nemo_like._util.module_tree import bare_modules
from nemo_like.activation_checkpointing.engine.module_state import ModuleState
from nemo_like.distributed.consistency_checks import gather, gather_objects
from nemo_like.distributed.context.verify_cut import evaluating, first_tokens, put_back
from nemo_like.distributed.pipeline.cut import HeldStage, StagesOfRank, cut_batch, joined, size_of
from nemo_like.losses.model_loss import ITEMS, LABELS
from nemo_like.losses.rows import IGNORED, predicts_next_token
from nemo_like.options import PipelineParallel
from nemo_like.torch_compat import answering_calls
from nemo_like.transformers_compat import model_base

# Compared of a micro-batch: at a vocabulary of 128k, two take 0.8 GB with their gradients, 12 bytes a logit.
_TOKENS = 256
# Calls that look whether to compare: the first ones, and then each of so many. A look reads the device, and all ranks
# take part in it.
_FIRST_LOOKS, _LOOK_EVERY = 4, 16
# Allowed difference of gradients, relative to their norm; the second where something is computed with fewer bits than
# float32 has.
_TOLERANCE, _LOWER = 1e-4, 3e-2


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
                f"pp adds up the losses of micro-batches, and cannot see the unit that the loss of {kind} is a mean "
                f"over. Write one of these, for pp={pp.size}:\n"
                f'  pp=PipelineParallel({pp.size}, loss_mean="tokens")  # over labels that are not {IGNORED}\n'
                f'  pp=PipelineParallel({pp.size}, loss_mean="rows")  # over rows or elements; or "sum"\n'
                f'  pp=PipelineParallel({pp.size}, loss_mean=lambda batch: (batch["ids"] != 0).sum())  # over real ids'
            )
        self.over = "tokens" if pp.loss_mean is None else pp.loss_mean
        self._shifts, self._kind = predicts_next_token(model), kind
        # Names of batches that were compared → whether one was whose micro-batches count differently.
        self._compared: dict[frozenset[str], bool] = {}
        self._calls = 0
        self.has_values = True  # Tensors have values. Without them micro-batches count alike, and nothing is compared.

    def cut(
        self, batch: Mapping[str, Any], count: int, device: torch.device | None = None
    ) -> tuple[list[dict[str, Any]], list[float]]:
        """Cut `batch` into `count` micro-batches on `device` (None: where it is), and return each one's share of the loss.

        Rows that are missing are filled up with labels that count for nothing. Labels are counted where they are given: on
        the host no rank waits for that.
        """
        labels = [name for name in LABELS if _are_classes(batch.get(name))] if self.over == "tokens" else []
        fill = dict.fromkeys(labels, IGNORED) or None
        shares = self._shares(cut_batch(batch, count, fill))
        if device is not None:
            batch = {key: send(value, device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        return cut_batch(batch, count, fill), shares

    def _shares(self, parts: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the share of each of `parts` in the loss of all of them."""
        count = len(parts)
        if count == 1 or self._is_sum(parts[0]):
            return [1.0] * count
        if self.over == "rows" or not self.has_values:
            return [1 / count] * count
        weigh = self.over if callable(self.over) else self._labels
        numbers = torch.stack([torch.as_tensor(weigh(part)).detach().double().reshape(()) for part in parts]).tolist()
        return [number / (sum(numbers) or math.nan) for number in numbers]  # NaN: the loss of nothing

    def _is_sum(self, batch: Mapping[str, Any]) -> bool:
        return self.over == "sum" or (self.over == "tokens" and batch.get(ITEMS) is not None)

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
        """Compare the micro-batches that the stages were given: in the first step, in the first with other names in its
        batch, and in the first whose micro-batches count differently, of the steps that look (`_FIRST_LOOKS`). There it
        is a collective of all ranks that share a stage; elsewhere no rank waits for it.

        Raises:
            ValueError: on every rank: the losses of micro-batches do not add up to that of the batch.
        """
        parts, shares = pipeline.stages[0].forward.microbatches, pipeline.stages[0].forward.shares
        self._calls += 1
        looks = self._calls <= _FIRST_LOOKS or self._calls % _LOOK_EVERY == 0
        if len(parts) == 1 or not self.has_values or not looks:
            return
        names = frozenset(batch)
        is_new = names not in self._compared
        if not self._compared.get(names) and (len(set(shares)) > 1 or len(set(_ignored(parts))) > 1):
            is_new = self._compared[names] = True
        self._compared.setdefault(names, False)
        votes = torch.tensor([is_new, math.isnan(shares[0])])
        is_new, nothing = gather(votes, pipeline.groups_of_stage).max(0).values.tolist()
        if nothing:
            raise ValueError(
                "Nothing counts in the batch: its loss gives no gradient. Give labels of which some count."
            )
        if is_new:
            self._compare(pipeline, parts, shares)

    def _compare(self, pipeline: StagesOfRank, parts: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> None:
        off: float | str = 0.0
        failure: Exception | None = None
        if pipeline.stages[-1].slice.is_last:
            last = LastStage(pipeline, pipeline.stages[-1])
            order = sorted(range(len(shares)), key=shares.__getitem__)
            try:
                with last.undisturbed():
                    off = self._off(last, *(_few_tokens(_usable(parts[number])) for number in (order[-1], order[0])))
                off = off if off > (_LOWER if last.fewer_bits else _TOLERANCE) else 0.0
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
        items = f", or leave {ITEMS} out" if self.over == "tokens" else ""
        if self.over == "tokens" and not self._shifts:
            shifted = f"lambda batch: (batch['labels'][:, 1:] != {IGNORED}).sum()"
            items += f". A model that shifts its labels needs a function: {shifted}"
        return (
            f"pp cannot add up the losses of this {self._kind}'s micro-batches under {setting}: the loss of two in one "
            f"call, or its gradient, is off by {off:.1e} of its size. Write the unit that the loss is a mean over, "
            f"with PipelineParallel(loss_mean='tokens' | 'rows' | 'sum' | a function of a micro-batch){items}. A loss "
            "of terms that are means over different things takes strategy='fsdp2' with tp or cp in place of pp."
        )

    def _off(self, last: LastStage, one: dict[str, Any], other: dict[str, Any]) -> float:
        """Return the relative error of the loss of two micro-batches, or of its gradient, against the sum of both."""
        weights = self._shares((one, other))
        if math.isnan(weights[0]):
            return 0.0
        both = joined(one, other)
        states, places = last.states(one, both)
        whole, loss = last.gradients(both, states)
        halves = zip(
            *((state, state) if place is None else state.chunk(2, place) for state, place in zip(states, places))
        )
        singles = [last.gradients(part, half) for part, half in zip((one, other), halves)]
        terms = [
            value * weight if weight else value.nan_to_num() * 0.0  # a mean over nothing
            for (_, value), weight in zip(singles, weights)
        ]
        # A term that gives the hidden states no gradient shows in the loss alone.
        off = [_norm(terms[0] + terms[1] - loss) / max(*map(_norm, (loss, *terms)), 1e-30)]
        parts = zip(*([gradient * weight for gradient in grads] for (grads, _), weight in zip(singles, weights)))
        least = 1e-3 * sum(_norm(gradient) ** 2 for gradient in whole) ** 0.5
        for wanted, place, pair in zip(whole, places, parts):
            facing = [(pair[0] + pair[1], wanted)] if place is None else zip(pair, wanted.chunk(2, place))
            off += [_norm(added - right) / max(_norm(right), least, 1e-30) for added, right in facing]
        return max(number if number == number else float("inf") for number in off)


def _are_classes(labels: object) -> bool:
    return isinstance(labels, Tensor) and not labels.is_floating_point()


def _ignored(parts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return how many numbers of each micro-batch mean that a label does not count: one read."""
    counts = [[(value == IGNORED).sum() for value in part.values() if _are_classes(value)] for part in parts]
    return torch.stack([torch.stack(each).sum() for each in counts]).tolist() if counts[0] else []


def _usable(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a micro-batch with copies of tensors made in inference mode, which no gradient takes."""
    return {k: v.clone() if isinstance(v, Tensor) and v.is_inference() else v for k, v in part.items()}


def _few_tokens(part: dict[str, Any]) -> dict[str, Any]:
    """Return the first tokens of a micro-batch whose tokens have labels."""
    rows, tokens = size_of(part)
    few = max(16, _TOKENS // rows)
    labelled = any(_are_classes(part.get(name)) and part[name].shape[:2] == (rows, tokens) for name in LABELS)
    return first_tokens(part, tokens, few, 1) if labelled and few < tokens else part


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


class LastStage:
    """The last stage, called by itself: without its layers, with hidden states that are drawn."""

    def __init__(self, pipeline: StagesOfRank, stage: HeldStage) -> None:
        self._pipeline, self._stage = pipeline, stage
        self._drawn = torch.Generator().manual_seed(0)
        exact = torch.get_float32_matmul_precision() == "highest"
        # Something was computed with fewer bits than float32 has.
        self.fewer_bits = not exact or any(map(_is_low, stage.module.parameters()))

    def states(self, first: Mapping[str, Any], both: Mapping[str, Any]) -> tuple[list[Tensor], list[int | None]]:
        """Draw tensors that the stage before might send for `both`; and return the dimensions to cut them along."""
        pipeline, index = self._pipeline, self._stage.slice.index - 1
        rows, tokens = size_of(first)
        states, places = [], []
        # Whole sequences, as layers give them to the loss: none of them runs.
        tokens *= pipeline.parts.sent_by
        sent = zip(pipeline.parts.sent(index, both, 2 * rows, tokens), pipeline.parts.sent(index, first, rows, tokens))
        for form, half in sent:
            states.append(torch.randn(form.shape, generator=self._drawn).to(pipeline.device, form.dtype))
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
                if (passing := pipeline.parts.passing(index)) is not None:
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
