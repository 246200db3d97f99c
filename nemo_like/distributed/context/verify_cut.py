"""The first call on parts of sequences compared with the same call on whole ones, on the same weights.

Nothing in a model's structure tells for certain where positions come from, or that no other function than attention looks
along the sequence. So the first tokens of a model's first batch are run twice, and the hidden states, the outputs and the
loss compared: in training without dropout, and as many tokens as a rank's part has. The whole length is not run: for 8B
parameters and 128k tokens a whole sequence's logits alone take 67 GB of float32 on each rank, where a step under ``cp=8``
takes an eighth of them; a part's length takes no more than the step's own forward. What depends on the length in a loss,
its targets and its divisor, is compared as whole numbers in every call (`whole_loss`).

A model that draws other random numbers in training, too, is compared in evaluation mode. ``NEMO_LIKE_VERIFY=1`` compares
the whole first batch, ``0`` nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

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

_TOKENS_PER_RANK = 16
_EXACT = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Allowed difference, relative to the norm of what is compared."""
_LOWER, _LOWER_LOSS = 0.1, 3e-2
"""Allowed difference where something is computed with fewer bits: of tensors, and of the loss, a mean over tokens."""
_LEFT_OUT = 4
"""One token in so many, the furthest off, does not count: rounding may send it to another expert."""
_MEDIA = re.compile(r"pixel|image|video|audio|speech|feature|grid|media|vision|visual", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"^(image|video|audio|speech|media|vision)\w*_token_(id|index)$")
_PLAIN = int | float | str | None


def wanted(length: int, ranks: int) -> int | None:
    """Return how many times the ranks' number of tokens of a sequence of `length` to compare; 0: all; None: nothing is
    compared.

    As many as a part has fit where a part fits.
    """
    default = max(_TOKENS_PER_RANK, length // ranks**2)
    return {"0": None, "1": 0}.get(os.environ.get("NEMO_LIKE_VERIFY", ""), default)


def verify_cut(model: nn.Module, parts: Parts, batch: Mapping[str, Any], tokens: int) -> None:
    """Raise ValueError, on every rank, where `model` answers otherwise on parts than on whole sequences.

    Args:
        batch: arguments of the call by name.
        tokens: as `wanted` gives.
    """
    main = main_input(dict(batch))
    assert main is not None  # the caller looked
    inputs = first_tokens(batch, sequence_length(main), tokens, parts.ranks, placeholders(model))

    def compare() -> tuple[float, bool]:
        whole, changed, _ = _run(model, parts, inputs, "whole")
        try:
            part, _, drew = _run(model, parts, inputs, "parts", changed)
        except (IndexError, RuntimeError) as error:
            if isinstance(error, NotImplementedError):  # cp's own refusal, which tells more
                raise
            raise ValueError(
                f"This {type(model).__name__} runs on whole sequences and fails on a part of cp={parts.ranks}: {error}. It "
                "looks along the sequence outside of its layers (positions by the length, or a head at one token, for which "
                "write loss_mean='rows'). Use cp=1."
            ) from error
        bits, shown = fewer_bits(model, whole), inputs.get("attention_mask")
        pairs = zip(part, whole, strict=True) if len(part) == len(whole) else ()
        return max((excess(parts, *pair, bits, shown) for pair in pairs), default=float("inf")), drew

    refuse_others([model], parts, compare, [find_group(parts.group)], main.device)


def _run(
    model: nn.Module, parts: Parts, inputs: Mapping[str, Any], word: str, again: bool | None = None
) -> tuple[list[Tensor], bool, bool]:
    """Call `model`, twice where the first call changes a buffer, which the second one may read.

    again: whether to call it twice; None: where a buffer is changed.

    Returns:
        The tensors that are compared, and whether a buffer was changed and random numbers were drawn.
    """
    parts.verifying = word
    token = WHOLE.set(word == "whole")
    try:
        with as_it_was(model) as traces, chunked_in_evaluation(model):
            answer = answers(model(**inputs))
            changed = traces.changed()
            if changed if again is None else again:
                answer += answers(model(**inputs))
            return [*parts.seen, *answer], changed, traces.drew()
    finally:
        parts.verifying, parts.seen = None, []
        WHOLE.reset(token)


def excess(
    parts: Parts, actual: Tensor, expected: Tensor, fewer_bits: bool = False, shown: Tensor | None = None
) -> float:
    """Return how far what parts gave is off what whole sequences gave, as a multiple of what is allowed.

    Args:
        actual: (B, S / ranks, ...) of this rank, joined first; or anything of the shape of `expected`.
        fewer_bits: something on the way was computed with less than float32.
        shown: (B, S) mask; tokens that it hides are not compared.
    """
    actual, expected = (each.full_tensor() if isinstance(each, DTensor) else each for each in (actual, expected))
    if actual.ndim > 1 and actual.shape != expected.shape:
        actual = parts.gather(actual, 1)[:, : expected.shape[1]]
    if actual.shape != expected.shape:
        return float("inf")
    lower = fewer_bits or expected.dtype not in _EXACT
    allowed = (_LOWER if expected.ndim else _LOWER_LOSS) if lower else _EXACT[expected.dtype]
    if expected.ndim > 2:
        hides = isinstance(shown, Tensor) and shown.shape == expected.shape[:2]
        kept = shown.flatten() != 0 if hides else slice(None)  # type: ignore[union-attr]
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
    rounds = device != "cpu" and torch.get_float32_matmul_precision() != "highest"
    rounds = rounds or torch.is_autocast_enabled(device) or any(tensor.dtype not in _EXACT for tensor in compared)
    return rounds or any("Float8" in type(module).__name__ for module in model.modules())


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
    kind = type(models[0]).__name__
    training = any(module.training for model in models for module in model.modules())
    for mode in [True, False] if training else [False]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_without_dropout())
            for model in models if not mode else ():
                stack.enter_context(evaluating(model))
            worst = torch.tensor(compare(), dtype=torch.float64, device=device)
        for group in groups:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        off, drawn = worst.tolist()
        if off <= 1:
            return
        if not mode or not drawn:
            raise ValueError(
                f"cp={parts.ranks} gives this {kind} other outputs than whole sequences do (off by {off:.0f} times what "
                "rounding is allowed): something in it looks along the sequence, counts positions, or makes its loss of a "
                "part, without the functions that cp replaces; or loss_mean= is not what its loss is a mean over. Use cp=1, "
                "or take positions as an argument position_ids."
            )
        warn_once(
            f"cp compares this {kind} with whole sequences in evaluation mode: in training it draws random numbers, other "
            "ones for a part. What looks along the sequence in training alone is not seen.",
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
    configs = [vars(getattr(module, "config", object)) for model in models for module in model.modules()]
    ids = (value for config in configs for name, value in config.items() if _PLACEHOLDER.match(name))
    return sorted({value for value in ids if isinstance(value, int)})


def first_tokens(
    batch: Mapping[str, Any], length: int, tokens: int, ranks: int, placeholders: Sequence[int] = ()
) -> dict[str, Any]:
    """`batch` with the first tokens of its sequences of `length`: `tokens` for each of `ranks`; 0: all, as it is.

    Where the whole sequences are padded, one less, so that these are, too. Text alone: pictures and sounds are left out, and
    an id for the `placeholders` in which they would be put. Where none of these tokens has a label that counts, or a row
    shows none, all have and do.
    """
    if not tokens:
        return dict(batch)
    few = min(length, tokens * ranks - (sequence_ops.padded_length(length, ranks) != length))
    text = {name: value for name, value in batch.items() if "token_type" in name or not _MEDIA.search(name)}
    return {name: _shown(name, _first(value, length, few), placeholders) for name, value in text.items()}


def _first(value: Any, length: int, few: int) -> Any:
    if few < length and is_block_mask(value) and value.shape[-1] == length:
        return first_of_mask(value, few)
    if not isinstance(value, Tensor) or few == length:
        return value
    for dim in range(value.ndim - 1, 0, -1):
        if value.shape[dim] == length:
            value = value.narrow(dim, 0, few).contiguous()  # as whole sequences are: models view them
    return value


def _shown(name: str, value: Any, placeholders: Sequence[int]) -> Any:
    """`value` of these first tokens, so that something of each row is seen, labelled, and text."""
    if not isinstance(value, Tensor) or value.is_floating_point():
        return value
    if name == "mm_token_type_ids" or (name in LABELS and value.ndim > 1 and bool((value < 0).all())):
        return torch.zeros_like(value)
    if name == "attention_mask" and value.ndim == 2 and not bool(value.any(1).all()):
        return torch.ones_like(value)
    if name == "input_ids" and placeholders:
        hidden = torch.isin(value, torch.tensor(placeholders, device=value.device))
        return value.masked_fill(hidden, next(i for i in range(len(placeholders) + 1) if i not in placeholders))
    return value


def answers(output: Any) -> list[Tensor]:
    """Return the tensors in a model's output that are compared: the loss, and the others, but for logits that are not
    computed."""
    return [one for one in tensors_of(output) if not isinstance(one, StandIn) and one.is_floating_point()]


@contextlib.contextmanager
def as_it_was(*models: nn.Module) -> Iterator[SimpleNamespace]:
    """Within it, `models` are called for a comparison: without gradients, and uncompiled, or layers would be compiled for
    other lengths. Random numbers, buffers and plain attributes are put back after.

    Yields functions that tell what calls have done so far: ``changed()`` a buffer, ``drew()`` random numbers.
    """
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
            yield SimpleNamespace(
                changed=lambda: _versions(models) != buffers,
                drew=lambda: any(read() != before[name] for name, (read, _) in states.items()),
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
