"""A call on parts of sequences compared with the same call on whole ones, on the same weights.

Nothing in a model's structure tells for certain where positions come from, that no other function than attention looks along
the sequence, or what its loss is made of. So the first tokens of a model's first batch are run twice, and the hidden states,
the outputs and the loss compared: in training without dropout, and as many tokens as a rank's part has. A model that draws
other random numbers in training, too, is compared in evaluation mode. ``NEMO_LIKE_VERIFY=1`` compares the whole first batch
(which takes the memory of whole sequences), ``0`` none.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like._util.log import warn_once
from nemo_like.distributed.context import sequence_ops
from nemo_like.distributed.context.masks import first_tokens as first_of_mask
from nemo_like.distributed.context.masks import is_block_mask
from nemo_like.distributed.context.parts import WHOLE, Parts
from nemo_like.distributed.context.sequence_ops import find_group
from nemo_like.distributed.context.stack_calls import main_input, tensors_of
from nemo_like.distributed.tensor.shared_random import generators
from nemo_like.losses.model_loss import LABELS, chunked_in_evaluation
from nemo_like.losses.stand_in import StandIn

VARIABLE = "NEMO_LIKE_VERIFY"
_TOKENS_PER_RANK = 16
_EXACT = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Allowed difference, relative to the norm of what is compared."""
_LOWER, _LOWER_LOSS = 0.1, 3e-2
"""Allowed difference where something is computed with fewer bits: of tensors, and of the loss, a mean over tokens."""
_LEFT_OUT = 4
"""One token in so many, the furthest off, does not count: rounding may send it to another expert."""
_MEDIA = re.compile(r"pixel|image|video|audio|speech|feature|grid|media|vision|visual", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"^(image|video|audio|speech|media|vision)\w*_token_(id|index)$")


def wanted(length: int, ranks: int) -> int | None:
    """Return how many times the ranks' number of tokens of a sequence of `length` to compare; 0: all; None: nothing is
    compared.

    As many as a part has fit where a part fits.
    """
    return {"0": None, "1": 0}.get(os.environ.get(VARIABLE, ""), max(_TOKENS_PER_RANK, length // ranks**2))


def verify_cut(
    model: nn.Module,
    parts: Parts,
    batch: Mapping[str, Any],
    tokens: int,
    look: Callable[[dict[str, Any], Any, int], None],
) -> None:
    """Raise ValueError, on every rank, where `model` answers otherwise on parts than on whole sequences.

    Args:
        given: arguments of the call by name.
        tokens: as `wanted` gives.
        look: called with the arguments of the call on whole sequences, what the model gave, and their length, before it is
            called on parts.
    """
    main = main_input(dict(batch))
    assert main is not None  # the caller looked
    inputs = first_tokens(batch, sequence_length(main), tokens, parts.ranks, placeholders(model))
    main = main_input(inputs)
    assert main is not None
    shown, length = inputs.get("attention_mask"), sequence_length(main)

    def compare() -> tuple[float, bool]:
        whole = _run(model, parts, inputs, "whole")
        look(inputs, whole.output, length)
        try:
            part = _run(model, parts, inputs, "parts", whole.changed)
        except NotImplementedError:  # cp's own refusal, which tells more
            raise
        except (RuntimeError, IndexError) as error:
            kind = type(model).__name__.removeprefix("FSDP")
            raise ValueError(
                f"cp={parts.ranks} gives each rank a part of every sequence, and this {kind} "
                f"fails on a part where it runs on the whole: {error}. It looks along the sequence outside of its layers "
                "(a head at one token, positions by the length). Train it without cp."
            ) from error
        bits, same = fewer_bits(model, whole.answers), len(part.answers) == len(whole.answers)
        pairs = zip(part.answers, whole.answers, strict=True) if same else ()
        return max((excess(parts, *pair, bits, shown) for pair in pairs), default=float("inf")), part.drew

    refuse_others([model], parts, compare, [find_group(parts.group)], main.device)


class _Run(NamedTuple):
    """A run of a model: one call, or two where the first changes a buffer, which the second one may read."""

    output: Any
    answers: list[Tensor]
    """Tensors that are compared."""
    changed: bool
    """A buffer was changed."""
    drew: bool
    """Random numbers were drawn."""


def _run(model: nn.Module, parts: Parts, inputs: Mapping[str, Any], word: str, again: bool | None = None) -> _Run:
    """again: whether to call it twice; None: where a buffer is changed."""
    parts.verifying = word
    token = WHOLE.set(word == "whole")
    try:
        with as_it_was(model) as traces, chunked_in_evaluation(model):
            output = model(**inputs)
            answer = answers(output)
            changed = traces.changed()
            if changed if again is None else again:
                answer += answers(model(**inputs))
            return _Run(output, [*parts.seen, *answer], changed, traces.drew())
    finally:
        parts.verifying, parts.seen = None, []
        WHOLE.reset(token)


def excess(
    parts: Parts, actual: Tensor, expected: Tensor, fewer_bits: bool = False, shown: Tensor | None = None
) -> float:
    """Return how far what parts gave is off what whole sequences gave, as a multiple of what is allowed.

    Args:
        found: (B, S / ranks, ...) of this rank, joined first; or anything of the shape of `expected`.
        fewer_bits: something on the way was computed with less than float32.
        shown: (B, S) mask; tokens that it hides are not compared.
    """
    actual, expected = (each.full_tensor() if isinstance(each, DTensor) else each for each in (actual, expected))
    if actual.ndim > 1 and actual.shape != expected.shape:
        actual = parts.gather(actual, 1)[:, : expected.shape[1]]
    if actual.shape != expected.shape:
        return float("inf")
    allowed = _EXACT.get(expected.dtype)
    if allowed is None or fewer_bits:
        allowed = _LOWER if expected.ndim else _LOWER_LOSS
    if expected.ndim > 2:
        kept = slice(None)
        if isinstance(shown, Tensor) and shown.shape == expected.shape[:2]:
            kept = shown.flatten() != 0  # type: ignore[assignment]
        actual, expected = (each.flatten(0, 1).flatten(1)[kept] for each in (actual, expected))
    actual, expected = actual.double(), expected.double()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error, scale = (actual - expected).masked_fill(same, 0), expected.nan_to_num()
    if expected.ndim == 2:
        order = error.norm(dim=1).argsort()[: len(error) - len(error) // _LEFT_OUT]
        error, scale = error[order], scale[order]
    off = (error.norm() / scale.norm().clamp(min=1e-30)).item()
    return off / allowed if off == off else float("inf")


def fewer_bits(model: nn.Module, compared: list[Tensor]) -> bool:
    """Return whether `model` computes with less than float32 somewhere, as far as that shows."""
    device = next((tensor.device.type for tensor in compared), "cpu")
    return (
        any(tensor.dtype not in _EXACT for tensor in compared)
        or torch.is_autocast_enabled(device)
        or (device != "cpu" and torch.get_float32_matmul_precision() != "highest")
        or any("Float8" in type(module).__name__ for module in model.modules())
    )


def refuse_others(
    models: Sequence[nn.Module],
    parts: Parts,
    compare: Callable[[], tuple[float, bool]],
    groups: Sequence[Any],
    device: torch.device,
) -> None:
    """Raise ValueError, on every rank of `groups`, where `compare` comes to more than one.

    It calls `models` and gives `excess`, and whether random numbers were drawn. They run as they train, without dropout.
    What differs where numbers are drawn all the same, other ones for a part, is compared in evaluation mode again.
    """
    training = any(module.training for model in models for module in model.modules())
    for mode in [True, False] if training else [False]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_without_dropout())
            for model in models:
                stack.enter_context(contextlib.nullcontext() if mode else evaluating(model))
            worst = torch.tensor(compare(), dtype=torch.float64, device=device)
        for group in groups:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        off, drawn = worst.tolist()
        if off <= 1:
            return
        if not mode or not drawn:
            raise ValueError(
                f"cp={parts.ranks} gives this {type(models[0]).__name__} other outputs than whole sequences do (off by "
                f"{off:.0f} times what rounding is allowed): something in it looks along the sequence, counts positions, or "
                "makes its loss of a part, without the functions that cp replaces. Use cp=1, or take positions as an "
                "argument position_ids."
            )
        warn_once(
            f"cp compares this {type(models[0]).__name__} with whole sequences in evaluation mode: in training it draws "
            "random numbers, other ones for a part. What looks along the sequence in training alone is not seen.",
            key="cp compared in evaluation mode",
        )


@contextlib.contextmanager
def _without_dropout() -> Iterator[None]:
    """Within it, dropout by torch's function drops nothing."""
    before = F.dropout
    F.dropout = lambda input, *args, **kwargs: input
    try:
        yield
    finally:
        F.dropout = before


def sequence_length(main: Tensor) -> int:
    """Tokens per row of ids (B, S), or with choices or codebooks in addition, or of embeddings (B, S, D)."""
    return main.shape[1] if main.is_floating_point() else max(main.shape[1:])


def placeholders(*models: nn.Module) -> list[int]:
    """The ids in whose places the states of pictures and sounds are put."""
    ids: set[int] = set()
    for module in (module for model in models for module in model.modules()):
        for name, value in vars(getattr(module, "config", object)).items():
            if _PLACEHOLDER.match(name) and isinstance(value, int):
                ids.add(value)
    return sorted(ids)


def first_tokens(
    batch: Mapping[str, Any], length: int, tokens: int, ranks: int, placeholders: list[int] | None = None
) -> dict[str, Any]:
    """`given` with the first tokens of its sequences of `length`: `tokens` for each of `ranks`; 0: all, as it is.

    Where the whole sequences are padded, one less, so that these are, too. Text alone: pictures and sounds are left out, and
    an id for the `placeholders` in which they would be put. Where none of these tokens has a label that counts, or a row
    shows none, all have and do.
    """
    if not tokens:
        return dict(batch)
    cut: dict[str, Any] = {}
    for name, value in batch.items():
        if "token_type" in name or not _MEDIA.search(name):
            kept = length if not _own_length(name, value) else value.shape[1]
            few = tokens * ranks - (sequence_ops.padded_length(kept, ranks) != kept)
            cut[name] = _first(value, kept, min(kept, few))
    for name, value in cut.items():
        if not isinstance(value, Tensor) or value.is_floating_point():
            continue
        if name in LABELS and value.ndim > 1 and bool((value < 0).all()):
            cut[name] = torch.zeros_like(value)
        elif name == "attention_mask" and value.ndim == 2 and not bool(value.any(1).all()):
            cut[name] = torch.ones_like(value)
        elif name == "mm_token_type_ids":
            cut[name] = torch.zeros_like(value)
        elif name in ("input_ids", "decoder_input_ids") and placeholders:
            hidden = torch.isin(value, torch.tensor(placeholders, device=value.device))
            cut[name] = value.masked_fill(
                hidden, next(i for i in range(len(placeholders) + 1) if i not in placeholders)
            )
    return cut


def _own_length(name: str, value: object) -> bool:
    """Return whether `value` has a sequence of its own: of labels or a decoder, next to an encoder's."""
    return isinstance(value, Tensor) and value.ndim > 1 and (name in LABELS or name.startswith("decoder_"))


def _first(value: Any, length: int, few: int) -> Any:
    if few < length and is_block_mask(value) and value.shape[-1] == length:
        return first_of_mask(value, few)
    if not isinstance(value, Tensor) or few == length:
        return value
    for dim in range(value.ndim - 1, 0, -1):
        if value.shape[dim] == length:
            value = value.narrow(dim, 0, few).contiguous()  # as whole sequences are: models view them
    return value


def answers(output: Any) -> list[Tensor]:
    """Return the tensors in a model's output that are compared: the loss, and the others, but for logits that are not
    computed."""
    return [one for one in tensors_of(output) if not isinstance(one, StandIn) and one.is_floating_point()]


class _Traces(NamedTuple):
    """Traces that calls have left so far."""

    changed: Callable[[], bool]
    """Tells whether the calls changed a buffer."""
    drew: Callable[[], bool]
    """Tells whether the calls drew random numbers."""


@contextlib.contextmanager
def as_it_was(*models: nn.Module) -> Iterator[_Traces]:
    """Within it, `models` are called for a comparison: without gradients, and uncompiled, or layers would be compiled for
    other lengths. Random numbers, buffers and plain attributes are put back after."""
    device = next((parameter.device.type for model in models for parameter in model.parameters()), "cpu")
    states = generators(device)
    before = {name: read() for name, (read, _) in states.items()}
    buffers = _versions(models)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for model in models:
            stack.enter_context(put_back(model))
        try:
            yield _Traces(
                lambda: _versions(models) != buffers,
                lambda: any(read() != before[name] for name, (read, _) in states.items()),
            )
        finally:
            for name, (_, write) in states.items():
                write(before[name])


def _versions(models: Sequence[nn.Module]) -> list[tuple[int, int]]:
    buffers = (buffer for model in models for buffer in model.buffers())
    return [(id(buffer), buffer._version if _may_change(buffer) else 0) for buffer in buffers]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it, `model` is in evaluation mode; its buffers and plain attributes are put back after."""
    with put_back(model):
        model.eval()
        yield


@contextlib.contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """The buffers and plain attributes of `model` are put back after it."""
    plain = [
        (attributes, {k: v for k, v in attributes.items() if isinstance(v, _PLAIN)})
        for attributes in map(vars, model.modules())
    ]
    slots = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in model.buffers() if _may_change(buffer)]
    try:
        yield
    finally:
        for attributes, values in plain:
            attributes.update(values)  # `training`, too
        for own_buffers, saved in slots:
            own_buffers.update(saved)
        with torch.no_grad():
            for buffer, version, copy in buffers:
                if buffer._version != version:
                    buffer.copy_(copy)


def _may_change(buffer: Tensor) -> bool:
    return not buffer.is_meta and not buffer.is_inference()


_PLAIN = int | float | str | None
