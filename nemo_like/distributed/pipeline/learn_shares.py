"""Find out, from the last stage's gradients, which share of the loss of a batch each micro-batch's loss is.

No model states whether its loss is a sum, a mean over rows or elements, or a mean over what counts, and of what. So in the
first step the loss of two micro-batches in one call gives gradients to the hidden states of both. These must be the
gradients that the loss of each gives alone, times its share. Layers are left out of these calls, and hidden states are
drawn: the loss is a function of what comes behind the layers. Shares that the first batch does not tell apart are compared
in each step, and where they differ the last stage is asked again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_like._util.module_tree import bare_modules
from nemo_like.activation_checkpointing.engine.module_state import ModuleWorld
from nemo_like.distributed.agreement import gather, gather_objects
from nemo_like.distributed.context.verify_cut import evaluating, put_back
from nemo_like.distributed.pipeline.batches import (
    MEAN,
    SUM,
    BatchShares,
    Counted,
    LossShares,
    Share,
    counts_of_all,
    cut_batch,
    first_rows,
    joined,
    marks,
    masks_and_classes,
    size_of,
    targets_of,
)
from nemo_like.distributed.pipeline.stage import Stage, StagesOfRank
from nemo_like.losses.batch_means import LossCall, LossCalls
from nemo_like.losses.model_loss import LABELS
from nemo_like.torch_compat import answering_calls

_COUNTED = 1e-3
"""Weights of classes are added up in another order."""
_TOLERANCE, _LOWER = 1e-4, 3e-2
"""Allowed difference of gradients, relative to their norm; the second where something is computed with fewer bits than
float32 has."""
_AGAIN = (3, 4)
"""The calls in which a loss that is made of more than mean cross entropies is asked again: of the second and third batch,
where the first one was asked for in a comparison before its step, too."""
_MOST_MEANS = 64
"""Cross entropies in a loss that is not asked."""
_LEFT_OUT = (("mean",), ("mean", "sum"))


class SharesByNames:
    """The `LossShares` of a pipeline, for batches of each set of names."""

    def __init__(self, pipeline: StagesOfRank) -> None:
        self._pipeline = pipeline
        self._known: dict[frozenset[str], LossShares] = {}
        self._seen: dict[frozenset[str], tuple[int, set[tuple[str, int]]]] = {}
        """Batches with these names, and their `marks`, as far as they were asked for."""
        self.last_off: Tensor | None = None
        """`BatchShares.off` of the last step, not read yet."""
        self._trusted = False

    def trust(self, names: Iterable[str]) -> None:
        """Take the loss of batches with these names for a sum over micro-batches, and each mean cross entropy in it for one
        over equally many targets, without asking: their tensors have no values."""
        self._trusted = True
        self._known[frozenset(names)] = LossShares([()] * _MOST_MEANS, [SUM], None, [None] * _MOST_MEANS, told=True)

    def check_last_step(self) -> None:
        """Raise ValueError, on every rank of the pipeline, where the last step's loss had other targets than its batch.

        Not in that step itself, which would wait for the device.
        """
        off, self.last_off = self.last_off, None
        if off is not None and not self._trusted and off.item() > _COUNTED:
            raise ValueError(
                "The cross entropies of the last step counted other targets than its batch has in the tensors that had them "
                f"in the first one (off by {off.item():.1%}). So the loss was not the mean over the whole batch. Mark what "
                "does not count in the labels themselves, not in a mask that the model applies to them."
            )

    def cut(self, batch: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int, int, BatchShares | None]:
        """Cut `batch` into micro-batches; with their rows, tokens, and shares (None: one micro-batch, or no last stage
        here).

        In the first call with such names, and where shares may differ, a collective of all ranks of the mesh.
        """
        pipeline = self._pipeline
        count = pipeline.options.microbatches or 1
        if count == 1:
            return *cut_batch(batch, 1), None
        key = frozenset(batch)
        if key not in self._known:
            self._known[key] = learned(pipeline, batch)
        known = self._known[key]
        cut = cut_batch(batch, count, known.fill)
        last = pipeline.stages[-1].slice.is_last
        shares = known.of(cut[0]) if last else []
        if not (known.certain and known.told):
            differ = last and (self._is_new(key, batch, known) or known.differ(cut[0]))
            empty = last and not all(shares[0])
            flags = gather(torch.tensor([differ, empty]), pipeline.groups)
            if bool(flags[:, 0].any()):
                known = self._known[key] = learned(pipeline, batch, known)
                shares = known.of(cut[0]) if last else []
            elif bool(flags[:, 1].any()):
                raise ValueError(
                    "A micro-batch has nothing that counts, so its mean loss is not a number. Give a batch in which every "
                    "micro-batch has something, or fewer micro-batches."
                )
        return *cut, BatchShares(known, cut[0], shares[0]) if last else None

    def _is_new(self, key: frozenset[str], batch: Mapping[str, Any], known: LossShares) -> bool:
        """Return whether `batch` may show of the loss what those before it did not."""
        if known.told:
            return False
        calls, before = self._seen.get(key, (0, set()))
        marked = marks(batch)
        self._seen[key] = calls + 1, before | marked
        return calls + 1 in _AGAIN or (calls > 0 and not marked <= before)


def learned(pipeline: StagesOfRank, batch: Mapping[str, Any], among: LossShares | None = None) -> LossShares:
    """Find the shares for batches with these names, from the loss of this one. A collective of all ranks of the mesh.

    among: what other batches have not told apart; None: nothing is known yet.

    Raises:
        ValueError: on every rank: no share gives the loss of the whole batch.
    """
    answer: _Answer | str | None = None
    failure: Exception | None = None
    weights: list[Tensor | None] = []
    if pipeline.stages[-1].slice.is_last:
        probe = _Probe(pipeline, pipeline.stages[-1], among)
        try:
            answer, weights = probe.answer(batch), probe.class_weights
        except Exception as error:  # noqa: BLE001  (raised below, once the other ranks know)
            answer, failure = f"{type(error).__name__}: {error}", error
    answers = [answer for _, answer in gather_objects((dist.get_rank(), answer), pipeline.groups)]
    if failure is not None:
        raise failure
    failed = next((answer for answer in answers if isinstance(answer, str)), None)
    if failed is not None:
        raise ValueError(f"The last stage cannot compute the loss. {failed}")
    good = [answer for answer in answers if isinstance(answer, _Answer)]
    if not good:
        raise ValueError("Nothing counts in the batch: its loss gives no gradient. Give labels of which some count.")
    if len({len(answer.means) for answer in good}) > 1:
        raise ValueError("The model computes its loss by more cross entropies on some ranks than on others.")
    shares = [share for share in good[0].shares if all(share in answer.shares for answer in good)]
    if not shares:
        kind = type(pipeline.stages[-1].module).__name__.removeprefix("FSDP")
        raise ValueError(
            f"pp cannot add up the losses of this {kind}'s micro-batches: its loss of two of them in one call is neither "
            "their sum nor their mean over rows, elements or what counts in labels and masks. (Its gradient is off by "
            f"{max(answer.off for answer in good):.1e} of its norm.) Train it with strategy='fsdp2' and tp or cp, or give "
            "it a loss in which each row or token has a term of its own."
        )
    means = [
        [one for one in mean if all(one in answer.means[number] for answer in good)]
        for number, mean in enumerate(good[0].means)
    ]
    fill = good[0].fill if all(answer.fill is not None for answer in good) else None
    return LossShares(means, shares, fill, weights, all(answer.told for answer in good))


@dataclass(frozen=True)
class _Answer:
    """The findings that the last stage has shown on one rank."""

    means: list[list[Counted]]
    """For each mean cross entropy, what its targets may be."""
    shares: list[Share]
    fill: dict[str, int] | None
    off: float
    """By which part of its norm the gradient, or the loss, is off under the best share."""
    told: bool
    """As of `LossShares`."""


class _Probe:
    """A probe of the loss in the last stage of one rank."""

    def __init__(self, pipeline: StagesOfRank, stage: Stage, among: LossShares | None) -> None:
        self._pipeline, self._stage, self._among = pipeline, LastStage(pipeline, stage), among
        self._seen: list[LossCall] = []
        self.class_weights: list[Tensor | None] = []
        """For each mean cross entropy."""
        self._targets: list[list[Counted]] = []
        """Candidates for the targets of each of `_seen`."""
        self._shares: dict[Share, float] = {}
        """By how much each is off."""
        self._calls_alone = self._told = False
        """The first: cross entropies alone are in the loss; the second: they are means."""
        self._marks: set[tuple[str, int]] = set()
        self._fills: dict[str, int] | None = None
        self._fills_sums = False
        """`_fills` is for a sum only."""

    def answer(self, batch: Mapping[str, Any]) -> _Answer | None:
        """Compare micro-batches in one call with each alone; None where nothing counts in any."""
        with self._stage.undisturbed():
            batch = {k: v.clone() if isinstance(v, Tensor) and v.is_inference() else v for k, v in batch.items()}
            rows, _ = size_of(batch)
            count = min(self._pipeline.options.microbatches or 1, rows)
            parts, size, tokens = cut_batch(first_rows(batch, rows - rows % count), count)
            self._marks = marks(batch)
            others = masks_and_classes(parts[0], self._marks)
            keys = [tuple(key) for key in zip(*counts_of_all(others, parts))] or [()] * count
            # One micro-batch of each kind: those in which as much counts as in another tell nothing more.
            distinct = {key: number for number, key in reversed(list(enumerate(keys))) if number}
            numbers = sorted(distinct.values()) or [0]
            for turn in range(self._most(len(numbers))):
                self._compare(parts[0], parts[numbers[turn % len(numbers)]], others, size, tokens)
        if not self._shares:
            return None
        least, tolerance = min(self._shares.values()), _LOWER if self._stage.fewer_bits else _TOLERANCE
        # Those that give the same numbers are off by the same.
        best = [share for share, off in self._shares.items() if off == least <= tolerance]
        fill = self._fills if best == [SUM] or not self._fills_sums else None
        told = self._told or (self._calls_alone and best == [SUM])
        return _Answer(self._means(), best, fill, least, told)

    def _compare(
        self, first: Mapping[str, Any], second: Mapping[str, Any], others: Sequence[Counted], rows: int, tokens: int
    ) -> None:
        """Note by how much each share is off for two micro-batches."""
        both = joined(first, second)
        states, places = self._stage.states(first, both, rows, tokens)
        context = LossCalls()
        whole, loss = self._stage.gradients(both, states, context)
        norm = _norm(whole)
        self.class_weights = [call.weight for call in context.seen if call.reduction == "mean"]
        tells = 0 < norm < float("inf")
        if tells:
            self._look_up(context.seen, both)
        asked_without = (self._stage.gradients(both, states, LossCalls(left_out=kinds)) for kinds in _LEFT_OUT)
        without = [_norm([*gradients, value]) for gradients, value in asked_without]
        if tells and not self._shares:
            self._shares = dict.fromkeys(self._candidates(without, others), 0.0)
        known = LossShares(self._means(), list(self._shares) if tells else (), None, self.class_weights)
        expected = {share: tuple(numbers) for share, numbers in zip(known.shares, known.of([first, second]))}
        measured: dict[tuple[float, ...], float] = {}
        different = list(dict.fromkeys(expected.values()))
        for turn in range(self._most(len(different))):
            numbers = different[turn] if turn < len(different) else (1.0, 1.0)
            batch = BatchShares(known, [first, second], numbers)
            halves = zip(*(_halves(tensor, place) for tensor, place in zip(states, places)))
            singles, losses = [], []
            for at, (part, half) in enumerate(zip((first, second), halves)):
                gradients, value = self._stage.gradients(part, half, batch.calls(at))
                singles.append([_times(gradient, numbers[at]) for gradient in gradients])
                losses.append(_times(value, numbers[at]))
            off = [
                _norm([one - other]) / max(_norm([other]), 1e-3 * norm)
                for wanted, place, *parts in zip(whole, places, *singles)
                for one, other in _pairs(parts, wanted, place)
            ]
            # A term that gives the hidden states no gradient shows in the loss alone.
            off.append(_norm([sum(losses) - loss]) / max(_norm([loss]), *(_norm([value]) for value in losses), 1e-30))
            measured[numbers] = max(map(_finite, off))
        for share, numbers in expected.items():
            self._shares[share] = max(self._shares[share], measured[numbers])

    def _most(self, count: int) -> int:
        """The largest `count` of the ranks that have this stage: FSDP2 gathers in each call, so all make as many calls."""
        return int(gather(torch.tensor([count]), self._pipeline.groups_of_stage).max())

    def _look_up(self, seen: list[LossCall], both: Mapping[str, Any]) -> None:
        targets = [targets_of(call, both) for call in seen]
        if self._seen and len(targets) != len(self._targets):
            raise ValueError(
                f"The model computes its loss by {len(self._targets)} cross entropies of some micro-batches and by "
                f"{len(targets)} of others: what the whole batch's loss is made of is not known."
            )
        before = self._targets if self._seen else targets
        self._seen, self._targets = seen, [[one for one in now if one in old] for now, old in zip(targets, before)]

    def _means(self) -> list[list[Counted]]:
        of_means = [targets for targets, call in zip(self._targets, self._seen) if call.reduction == "mean"]
        if self._among is None or len(of_means) != len(self._among.means):
            return of_means
        return [[one for one in now if one in before] for now, before in zip(of_means, self._among.means)]

    def _candidates(self, without: Sequence[float], others: Sequence[Counted]) -> Sequence[Share]:
        """Return what the shares may be; note what rows are filled with, where cross entropies alone are in the loss.

        without: the norm of the gradient and the loss without each of `_LEFT_OUT`.
        """
        means_alone, calls_alone = (
            norm == 0 and any(call.reduction in kinds for call in self._seen) for norm, kinds in zip(without, _LEFT_OUT)
        )
        every = [one for targets in self._targets for one in targets]
        if calls_alone and all(len(t) == 1 or (t and t[0].name in LABELS) for t in self._targets):
            self._fills = {one.name: one.ignored for one in every if one.ignored is not None}
            self._fills_sums = not means_alone
        self._calls_alone, self._told = calls_alone, means_alone
        if means_alone:
            return [SUM]
        if self._among is not None:
            # A number that no batch had before may count for nothing where all the others count.
            places = {(share.name, share.window) for share in self._among.shares if isinstance(share, Counted)}
            more = [one for one in others if one.ignored is not None and (one.name, one.window) in places]
            return [*self._among.shares, *more]
        known = {one.name for one in every}
        more = [one for one in others if one.ignored is not None or one.name not in known]
        return [MEAN, SUM, *every, *more]


def _halves(tensor: Tensor, place: int | None) -> Sequence[Tensor]:
    """Return what each of two micro-batches has of `tensor`."""
    return (tensor, tensor) if place is None else tensor.chunk(2, place)


def _pairs(parts: Sequence[Tensor], whole: Tensor, place: int | None) -> list[tuple[Tensor, Tensor]]:
    """The gradients of both micro-batches, each with the one that it has to be."""
    if place is None:
        return [(parts[0] + parts[1], whole)]
    return list(zip(parts, whole.chunk(2, place)))


def _norm(tensors: Collection[Tensor]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors)) ** 0.5


def _times(gradient: Tensor, share: float) -> Tensor:
    """Return the gradient times its share. Where nothing counts, a mean is not a number, and neither is its
    gradient."""
    return gradient * share if share else torch.zeros_like(gradient)


def _finite(number: float) -> float:
    return number if number == number else float("inf")


# The last stage of a pipeline, called by itself: without its layers, with hidden states that are drawn.


@dataclass
class _Alone:
    """`BatchShares` of one micro-batch, whose loss is not part of another's."""

    context: LossCalls
    shares: Sequence[float] = (1.0,)
    autocast: bool = False
    """The loss was computed under autocast."""

    def calls(self, number: int) -> LossCalls:
        self.autocast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        return self.context


class LastStage:
    """To be called within `undisturbed`."""

    def __init__(self, pipeline: StagesOfRank, stage: Stage) -> None:
        self._pipeline, self._stage = pipeline, stage
        self._drawn = torch.Generator().manual_seed(0)
        exact = torch.get_float32_matmul_precision() == "highest"
        self.fewer_bits = not exact or any(map(_is_low, stage.module.parameters()))
        """Something was computed with fewer bits than float32 has."""

    def states(
        self, first: Mapping[str, Any], both: Mapping[str, Any], rows: int, tokens: int
    ) -> tuple[list[Tensor], list[int | None]]:
        """Draw what the stage before might send for `both`; and the dimension along which two micro-batches have it."""
        pipeline, index = self._pipeline, self._stage.slice.index - 1
        states, places = [], []
        sent = zip(pipeline.parts.sent(index, both, 2 * rows, tokens), pipeline.parts.sent(index, first, rows, tokens))
        for form, half in sent:
            drawn = torch.randn(form.shape, generator=self._drawn).to(pipeline.device, form.dtype)
            states.append(drawn)
            places.append(next((dim for dim, (a, b) in enumerate(zip(form.shape, half.shape)) if a != b), None))
        return states, places

    def gradients(
        self, microbatch: Mapping[str, Any], states: Sequence[Tensor], context: LossCalls
    ) -> tuple[list[Tensor], Tensor]:
        """Compute the gradients of the loss of `microbatch` with respect to the hidden states, and the loss, 0-dim."""
        forward, alone = self._stage.forward, _Alone(context)
        before = forward.microbatches, forward.shares
        forward.microbatches, forward.shares = [microbatch], alone
        leaves = [state.detach().requires_grad_() for state in states]
        scale = 2.0 ** min(14, leaves[0][..., 0].numel().bit_length())  # or float16 has no gradients of a mean
        try:
            with put_back(self._stage.module):  # or a schedule in the model would go on
                loss = self._stage.module(*leaves, microbatch=torch.tensor([0])).sum()
            inputs = torch.autograd.grad(loss * scale, leaves, allow_unused=True) if loss.requires_grad else leaves
        finally:
            forward.microbatches, forward.shares = before
        if alone.autocast or any(map(_is_low, (*leaves, loss))):
            self.fewer_bits = True
        if not loss.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves], _whole(loss)
        grads = (torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, inputs))
        return [(grad.float() if _is_low(grad) else grad) / scale for grad in grads], _whole(loss)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within it, the last stage is called without its layers and without dropout; afterwards it is as it was."""
        pipeline, stage = self._pipeline, self._stage
        modules = dict(bare_modules(stage.module))
        training = stage.module.training
        devices = [pipeline.device] if pipeline.device.type == "cuda" else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.random.fork_rng(devices))
            ModuleWorld(stage.module).restore(stack)
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
