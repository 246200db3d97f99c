"""The first call on parts of sequences compared with the same call on whole ones, on the same weights.

Nothing in a model's structure tells for certain where positions come from, or that no other function than attention looks
along the sequence. So the first tokens of a model's first batch are run twice in evaluation mode, and the output of the
stack and the loss are compared: as many tokens as a rank's part has, and at most 4,096, whose float32 logits take 2 GB
at a vocabulary of 128k. The whole length is not run: at 128k tokens that is 67 GB on each rank, where a step under
``cp=8`` takes an eighth of them. The targets and the divisor of a loss, which depend on the length, are compared as
whole numbers in every call (`whole_loss`). ``NEMO_LIKE_VERIFY=1`` compares the whole first batch, ``0`` nothing.
"""

import contextlib
import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like._util.rng import random_numbers_put_back
from nemo_like.activation_checkpointing.engine.containers import refill
from nemo_like.activation_checkpointing.engine.module_state import ModuleState
from nemo_like.distributed.context.parts import Parts, tensors_of
from nemo_like.distributed.context.sequence_ops import find_group, padded_length
from nemo_like.losses.model_loss import LABELS, chunked_in_evaluation

# Calls of a model for a comparison alone: in evaluation mode, and the model is afterwards as it was.


@contextlib.contextmanager
def as_it_was(*models: nn.Module) -> Iterator[None]:
    """Within it, `models` are called for a comparison: in evaluation mode, without gradients, and uncompiled, or layers
    would be compiled for other lengths. Random numbers, buffers and plain attributes are put back after."""
    device = next((parameter.device for model in models for parameter in model.parameters()), torch.device("cpu"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(random_numbers_put_back(device))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for model in models:
            stack.enter_context(chunked_in_evaluation(model))
            stack.enter_context(put_back(model))
            model.eval()
        yield


@contextlib.contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """The buffers, attributes and containers of `model` are put back after it."""
    slots = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = [
        (buffer, buffer._version, buffer.detach().clone())
        for buffer in model.buffers()
        if not (buffer.is_meta or buffer.is_inference())
    ]
    try:
        with contextlib.ExitStack() as stack:
            state = ModuleState(model)
            for container in state.containers():
                stack.callback(refill, container, copy.copy(container))
            state.restore(stack)
            yield
    finally:
        for own_buffers, saved in slots:
            own_buffers.update(saved)
        with torch.no_grad():
            for buffer, version, before in buffers:
                if buffer._version != version:
                    buffer.copy_(before)


_TOKENS_PER_RANK, _MOST_TOKENS, _ROWS = 16, 4096, 1024
_EXACT = {torch.float32: 1e-4, torch.float64: 1e-6}  # Allowed difference, relative to the norm of the tensor.
# Allowed difference where something is computed with fewer bits: of tensors, and of the loss, a mean over tokens.
_LOWER, _LOWER_LOSS = 0.1, 3e-2
_LEFT_OUT = 4  # One token in so many, the furthest off, does not count: rounding may send it to another expert.
_MEDIA = re.compile(r"pixel|image|video|audio|speech|feature|grid|media|vision|visual", re.IGNORECASE)


def wanted(length: int, ranks: int) -> int | None:
    """Return how many times the ranks' number of tokens of a sequence of `length` to compare; 0: all; None: nothing is
    compared.

    As many as a part has fit where a part fits; more than 4,096 in all show nothing more.
    """
    default = max(_TOKENS_PER_RANK, min(length // ranks, _MOST_TOKENS) // ranks)
    return {"0": None, "1": 0}.get(os.environ.get("NEMO_LIKE_VERIFY", ""), default)


def verify_cut(model: nn.Module, parts: Parts, batch: Mapping[str, Any], main: Tensor) -> None:
    """Raise ValueError, on every rank, where `model` answers otherwise on parts than on whole sequences, of as many tokens
    as `wanted` tells.

    Args:
        batch: arguments of the call by name.
        main: that of them which the sequence is read from.
    """
    # Tokens per row of ids (B, S), or with choices or codebooks in addition, or of embeddings (B, S, D).
    length = main.shape[1] if main.is_floating_point() else max(main.shape[1:])
    tokens = wanted(length, parts.ranks)
    if tokens is None:
        return
    inputs = first_tokens(batch, length, tokens, parts.ranks)

    def answers() -> list[Tensor]:
        try:
            losses = losses_of(model(**inputs))
        except (IndexError, RuntimeError) as error:
            if isinstance(error, NotImplementedError) or parts.verifying == "whole":  # cp's own refusal tells more
                raise
            raise ValueError(
                f"This {type(model).__name__} runs on whole sequences and fails on a part of cp={parts.ranks}: {error}. It "
                "looks along the sequence outside of its layers (positions by the length, or a head at one token, for which "
                "write loss_mean='rows'). Use cp=1."
            ) from error
        return [*parts.seen, *losses]

    compare([model], [parts], answers, [find_group(parts.group)], main.device)


def compare(
    models: Sequence[nn.Module],
    cut: Sequence[Parts],
    answers: Callable[[], list[Tensor]],
    groups: Sequence[Any],
    device: torch.device,
) -> None:
    """Raise ValueError, on every rank of `groups`, where `answers`, which calls `models`, are others on parts.

    cut: of `models`.
    """
    whole, part = (answered(models, cut, answers, word) for word in ("whole", "parts"))
    lower = any(fewer_bits(model, whole) for model in models)
    off = [_off(cut[0], *pair, lower) for pair in zip(part, whole)] if len(part) == len(whole) else [float("inf")]
    worst = torch.tensor(max(off, default=0.0), dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    if worst.item() > 1:
        raise ValueError(
            f"cp={cut[0].ranks} gives this {type(models[0]).__name__} other outputs than whole sequences do (off by "
            f"{worst.item():.0f} times the limit of rounding): something in it looks along the sequence, counts "
            "positions, or makes its loss of a part, without the functions that cp replaces; or loss_mean= is not the "
            "unit that its loss is a mean over. Use cp=1, or take positions as an argument position_ids."
        )


def answered(
    models: Sequence[nn.Module], cut: Sequence[Parts], answers: Callable[[], list[Tensor]], word: str
) -> list[Tensor]:
    """Return the `answers` of `models`, which it calls on "parts" of sequences or on "whole" ones, by `word`."""
    for parts in cut:
        parts.verifying = word
    try:
        with as_it_was(*models):
            return [answer.full_tensor() if isinstance(answer, DTensor) else answer for answer in answers()]
    finally:
        for parts in cut:
            parts.verifying, parts.seen = None, []


def _off(parts: Parts, part: Tensor, whole: Tensor, lower: bool) -> float:
    """Return the error of the output of parts against that of whole sequences, as a multiple of the allowed error.

    Args:
        part: (B, S / ranks, ...) of this rank, joined first; or anything of the shape of `whole`.
        lower: something on the way was computed with fewer bits than float32 has.
    """
    if whole.ndim > 1 and part.shape != whole.shape:
        part = parts.gather(part, 1)[:, : whole.shape[1]]
    if part.shape != whole.shape:
        return float("inf")
    allowed = (_LOWER if whole.ndim else _LOWER_LOSS) if lower else _EXACT[whole.dtype]
    rows = (each.reshape(-1, each.shape[-1] if each.ndim else 1).split(_ROWS) for each in (part, whole))
    errors, sizes = map(torch.cat, zip(*(_norms(*some) for some in zip(*rows))))
    kept = errors.argsort()[: len(errors) - len(errors) // _LEFT_OUT]
    off = (errors[kept].norm() / sizes[kept].norm().clamp(min=1e-30)).item()
    return off / allowed if off == off else float("inf")


def _norms(part: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norms of the differences of rows, and of the rows of `whole`."""
    part, whole = part.double(), whole.double()
    error = (part - whole).masked_fill_(part.isnan() & whole.isnan(), 0)  # the loss of no labels
    return error.norm(dim=1), whole.nan_to_num_().norm(dim=1)


def fewer_bits(model: nn.Module, compared: list[Tensor]) -> bool:
    """Return whether `model` computes with less than float32 somewhere, as far as that shows."""
    device = next((tensor.device.type for tensor in compared), "cpu")
    rounds = device != "cpu" and torch.get_float32_matmul_precision() != "highest"
    rounds = rounds or torch.is_autocast_enabled(device) or any(tensor.dtype not in _EXACT for tensor in compared)
    return rounds or any(type(module).__name__ in ("Float8Linear", "MXFP8Linear") for module in model.modules())


def first_tokens(batch: Mapping[str, Any], length: int, tokens: int, ranks: int) -> dict[str, Any]:
    """`batch` with the first tokens of its sequences of `length`: `tokens` for each of `ranks`; 0: all, as it is.

    Where the whole sequences are padded, one less, so that these are, too. Pictures and sounds are left out, so that
    the ids in their places are text. Masks hide nothing, and where none of these tokens has a label that counts, all have.
    """
    if not tokens:
        return dict(batch)
    few = min(length, tokens * ranks - (padded_length(length, ranks) != length))
    text = {name: value for name, value in batch.items() if "token_type" in name or not _MEDIA.search(name)}
    return {name: _shown(name, _first(value, length, few)) for name, value in text.items()}


def _first(value: Any, length: int, few: int) -> Any:
    if not isinstance(value, Tensor) or few == length:
        return value
    for dim in range(value.ndim - 1, 0, -1):
        if value.shape[dim] == length:
            value = value.narrow(dim, 0, few).contiguous()  # as whole sequences are: models view them
    return value


def _shown(name: str, value: Any) -> Any:
    """`value` of these first tokens, so that something of each row is seen, labelled, and text."""
    if not isinstance(value, Tensor) or value.is_floating_point():
        return value
    if name == "mm_token_type_ids" or (name in LABELS and value.ndim > 1 and bool((value < 0).all())):
        return torch.zeros_like(value)
    if name == "attention_mask" and value.ndim == 2 and not bool((value > 1).any()):  # not of documents
        return torch.ones_like(value)
    return value


def losses_of(output: Any) -> list[Tensor]:
    """Return the losses in a model's output."""
    return [one for one in tensors_of(output) if one.ndim == 0 and one.is_floating_point()]
