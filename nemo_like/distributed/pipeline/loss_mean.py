"""The share of each micro-batch of a pipeline in the loss of the whole batch, by `PipelineParallel.loss_mean`.

No model tells whether its loss is a sum, a mean over rows, or a mean over labels that count: its user does. The last
stage is then called with two micro-batches at once. That loss must be the sum of the losses of each alone. Layers are
left out of these calls, and hidden states are drawn: the loss is a function of the modules behind the layers. Those of
one micro-batch are so small that a norm gives almost zeros for them: the two losses then differ, and a wrong share shows.

Values are compared, and gradients are not. Not seen are a term that is zero for both hidden states and has a gradient
there, and the gradient of 0 / 0, of a mean that the model computes itself of a micro-batch in which nothing counts.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.device_work import send
from nemo_like.distributed.consistency_checks import gather, together
from nemo_like.distributed.context.verify_cut import answered, fewer_bits, first_tokens
from nemo_like.distributed.pipeline.cut import StagesOfRank, cut_batch, joined, size_of
from nemo_like.losses.model_loss import ITEMS, LABELS
from nemo_like.losses.rows import IGNORED, predicts_next_token
from nemo_like.options import PipelineParallel
from nemo_like.transformers_compat import model_base

# Compared of a micro-batch: at a vocabulary of 128k, two take 0.3 GB, 4 bytes a logit.
_TOKENS = 256
# Calls that look whether to compare: the first ones, and then each of so many. A look reads the device, and all ranks
# take part in it.
_FIRST_LOOKS, _LOOK_EVERY = 4, 16
# Allowed difference of losses, relative to the largest, besides their own rounding; the second where something is
# computed with fewer bits than float32 has.
_TOLERANCE, _LOWER = 2e-5, 1e-3
_SCALES = 8.0, 1e-8  # Of hidden states: the second is below the epsilon of every norm, and is not 0 / 0 without one.


class LossMean:
    """The numbers that the loss of a model is a mean over.

    Raises:
        ValueError: `PipelineParallel.loss_mean` is left out, and the model is none of transformers.
    """

    def __init__(self, model: nn.Module, pp: PipelineParallel) -> None:
        self._kind = type(model).__name__
        if pp.loss_mean is None and not hasattr(model, "loss_function") and not isinstance(model, model_base() or ()):
            raise ValueError(
                f"pp adds up the losses of micro-batches, and cannot see the unit that the loss of {self._kind} is a mean "
                f"over. Write one of these, for pp={pp.size}:\n"
                f'  pp=PipelineParallel({pp.size}, loss_mean="tokens")  # over labels that are not {IGNORED}\n'
                f'  pp=PipelineParallel({pp.size}, loss_mean="rows")  # over rows or elements; or "sum"\n'
                f'  pp=PipelineParallel({pp.size}, loss_mean=lambda batch: (batch["ids"] != 0).sum())  # over real ids'
            )
        self.over, self._shifts = "tokens" if pp.loss_mean is None else pp.loss_mean, predicts_next_token(model)
        # Names of batches that were compared → whether one was whose micro-batches count differently.
        self._compared: dict[frozenset[str], bool] = {}
        # has_values: of tensors. Without them micro-batches count alike, and nothing is compared.
        self._calls, self.has_values = 0, True

    def cut(
        self, batch: Mapping[str, Any], count: int, device: torch.device | None = None
    ) -> tuple[list[dict[str, Any]], list[float]]:
        """Cut `batch` into `count` micro-batches on `device` (None: where it is), and return each one's share of the loss.

        Rows that are missing are filled up with labels that count for nothing. Labels are counted where they are given: on
        the host no rank waits for that.
        """
        fill = {k: IGNORED for k in LABELS if self.over == "tokens" and _are_classes(batch.get(k))} or None
        tensors = {k: send(v, device) for k, v in batch.items() if device is not None and isinstance(v, Tensor)}
        return cut_batch({**batch, **tensors}, count, fill), self._shares(cut_batch(batch, count, fill))

    def _shares(self, parts: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the share of each of `parts` in the loss of all of them."""
        if len(parts) == 1 or self.over == "sum" or (self.over == "tokens" and parts[0].get(ITEMS) is not None):
            return [1.0] * len(parts)
        if self.over == "rows" or not self.has_values:
            return [1 / len(parts)] * len(parts)
        counts = map(torch.as_tensor, map(self.over if callable(self.over) else self._labels, parts))
        numbers = torch.stack([count.detach().double().reshape(()) for count in counts]).tolist()
        return [number / (sum(numbers) or torch.nan) for number in numbers]  # NaN: the loss of nothing

    def _labels(self, microbatch: Mapping[str, Any]) -> Tensor:
        """Return how many labels count, 0-dim."""
        name = next((name for name in reversed(LABELS) if isinstance(microbatch.get(name), Tensor)), None)
        if name is None:
            raise ValueError(
                f'PipelineParallel.loss_mean is "tokens", which counts {", ".join(LABELS)}, and the batch has '
                f"{', '.join(microbatch)}. Give labels, or write loss_mean='rows', 'sum' or a function of a micro-batch."
            )
        # The first label of a row belongs to no prediction.
        shifts = self._shifts and name != "shift_labels" and microbatch[name].dim() > 1
        return (microbatch[name][..., 1:] if shifts else microbatch[name]).ne(IGNORED).sum()

    def check(self, pipeline: StagesOfRank, batch: Mapping[str, Any]) -> None:
        """Compare the micro-batches that the stages were given: in the first step, in the first with other names in its
        batch, and in the first whose micro-batches count differently, of the steps that look (`_FIRST_LOOKS`). There it
        is a collective of all ranks that share a stage; elsewhere no rank waits for it.

        Raises:
            ValueError: on every rank: the losses of micro-batches do not add up to that of the batch.
        """
        parts, shares = pipeline.stages[0].forward.microbatches, pipeline.stages[0].forward.shares
        self._calls += 1
        if len(parts) > 1 and self.has_values and (self._calls <= _FIRST_LOOKS or self._calls % _LOOK_EVERY == 0):
            compared = self._compared.get(names := frozenset(batch))
            self._compared[names] = uneven = compared or len(set(shares)) > 1 or len(set(_ignored(parts))) > 1
            votes = torch.tensor([compared != uneven, shares[0] != shares[0]])
            is_new, nothing = gather(votes, pipeline.groups_of_stage).max(0).values.tolist()
            if nothing:
                raise ValueError(
                    "Nothing counts in the batch: its loss gives no gradient. Give labels of which some count."
                )
            if is_new:
                ends = sorted(range(len(shares)), key=shares.__getitem__)[:: 1 - len(shares)]  # the last and the first
                self._compare(pipeline, [_few_tokens(parts[number]) for number in ends])

    def _compare(self, pipeline: StagesOfRank, pair: Sequence[dict[str, Any]]) -> None:
        weights = self._shares(pair)
        with together(
            pipeline.groups,
            lambda _rank, kind, words: ValueError(
                words if kind == "ValueError" else f"The last stage cannot compute the loss. {kind}: {words}"
            ),
        ):
            # The others raise its error.
            (whole, *parts), limit = _losses(pipeline, pair) if pipeline.stages[-1].slice.is_last else ([0.0] * 3, 0.0)
            # The loss of nothing is not a number: its weight is 0.
            terms = [loss * weight if weight else 0.0 for loss, weight in zip(parts, weights)]
            off = abs(sum(terms) - whole) / max(*map(abs, (whole, *terms)), 1e-30)
            if not (off <= limit or weights[0] != weights[0]):  # refused: a loss that is not a number, too
                raise ValueError(
                    f"pp cannot add up the losses of this {self._kind}'s micro-batches under "
                    f"loss_mean{f'={self.over!r}' if isinstance(self.over, str) else ''}: the loss of two in one call is "
                    f"off by {off:.1e} of its size. Write the unit that the loss is a mean over, with PipelineParallel("
                    "loss_mean='tokens' | 'rows' | 'sum' | a function of a micro-batch)"
                    + f", or leave {ITEMS} out"
                    * (self.over == "tokens")
                    + ". A model that shifts its labels needs a function: lambda batch: "
                    f"(batch['labels'][:, 1:] != {IGNORED}).sum()"
                    * (self.over == "tokens" and not self._shifts)
                    + ". A loss of terms that are means over different things takes strategy='fsdp2' with tp or cp in "
                    "place of pp."
                )


def _losses(pipeline: StagesOfRank, pair: Sequence[dict[str, Any]]) -> tuple[list[float], float]:
    """Return the losses of two micro-batches together and of each, and the error that rounding may have.

    The last stage is called without its layers and without dropout; afterwards it is as it was.
    """
    stage, batches, draw = pipeline.stages[-1], [joined(*pair), *pair], torch.Generator().manual_seed(0)
    module, forward, states = stage.module, stage.forward, list[list[Tensor]]()
    # Of whole sequences, as layers give them to the loss: none of them runs.
    for form, half in zip(
        *(
            pipeline.parts.sent(stage.slice.index - 1, batch, rows, pipeline.parts.sent_by * tokens)
            for batch, (rows, tokens) in zip(batches[:2], map(size_of, batches))
        )
    ):
        halves = [torch.randn(half.shape, generator=draw) * scale for scale in _SCALES]
        rows = next((dim for dim, (a, b) in enumerate(zip(form.shape, half.shape)) if a != b), None)
        three = halves[:1] * 3 if rows is None else [torch.cat(halves, rows), *halves]
        states.append([state.to(pipeline.device, form.dtype) for state in three])
    # Behind the micro-batches of this step, and gone with them.
    forward.microbatches, forward.shares = [*forward.microbatches, *batches], [*forward.shares, 1.0, 1.0, 1.0]

    def loss(number: int, inputs: tuple[Tensor, ...], training: bool = module.training) -> list[Tensor]:
        module.training = training  # a model may return a loss in training alone
        return [module(*inputs, microbatch=torch.tensor([number]))]

    with pipeline.without_layers(stage):
        # Each as if it were the only one, or a schedule in the model would go on.
        values = [
            answered([module], pipeline.sequence_parts(), partial(loss, *call), "whole")[0]
            for call in enumerate(zip(*states), -3)
        ]
    lower = fewer_bits(module, [*values, *(state for three in states for state in three)])
    return list(map(float, values)), torch.finfo(values[0].dtype).eps + (_LOWER if lower else _TOLERANCE)


def _are_classes(labels: object) -> bool:
    return isinstance(labels, Tensor) and not labels.is_floating_point()


def _ignored(parts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return how many numbers of each micro-batch mean that a label does not count: one read."""
    counts = [[(value == IGNORED).sum() for value in part.values() if _are_classes(value)] for part in parts]
    return torch.stack([torch.stack(count).sum() for count in counts]).tolist() if counts[0] else []


def _few_tokens(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first tokens of a micro-batch whose tokens have labels."""
    rows, tokens = size_of(part)
    few = max(16, _TOKENS // rows)
    shapes = (part[name].shape[:2] for name in LABELS if _are_classes(part.get(name)))
    return first_tokens(part, tokens, few if few < tokens and (rows, tokens) in shapes else 0, 1)
