"""`chunked_cross_entropy` and `chunked_log_probs`: from hidden states and labels, without the logits of all tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like._util.words import a_or_an, check_bool
from nemo_like.losses.heads import Head, autocast_dtype, trained_tensors
from nemo_like.losses.rows import CrossEntropyRows, Shape
from nemo_like.losses.runner import ChunkedCall, LossesInBackward, LossInForward
from nemo_like.options import ChunkedLoss
from nemo_like.torch_compat import call_in_fsdp_unit, is_fake

REDUCTIONS = ("mean", "sum", "none")


def chunked_cross_entropy(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | float | Tensor | None = None,
    shift: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    logit_scale: float | None = None,
    options: ChunkedLoss | None = None,
    parameters: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """Cross entropy of ``head(hidden)`` and `labels`, of which only a chunk of logits exists at a time.

    The gradients are made in forward, chunk by chunk, and scaled in backward, so that head and loss cost the FLOPs that
    they always do. (``reduction="none"``, whose weights only backward knows, runs the head twice.) Losses and the head's
    gradients are added in float32. Second derivatives are not known.

    >>> head = torch.nn.Linear(8, 100)
    >>> hidden, labels = torch.randn(2, 5, 8, requires_grad=True), torch.randint(100, (2, 5))
    >>> loss = chunked_cross_entropy(hidden, head, labels, shift=True, chunk_tokens=4)
    >>> loss.backward()
    >>> hidden.grad.shape
    torch.Size([2, 5, 8])

    Args:
        hidden: (..., D), the input of the head.
        head: a module or callable from (tokens, D) to (tokens, V): linear, tied, under LoRA, quantised, or cut by
            vocabulary over tensor-parallel ranks (a DTensor, ``Shard(-1)``). It is called for one token first, to
            see how wide it is.
        labels: (...), int64, in 0 ... V - 1; not moved to another device.
        chunk_tokens: tokens per chunk; default: as many as 256 MiB of logits hold.
        ignore_index: the label of tokens that do not count.
        reduction: ``"mean"`` over all tokens that count (NaN where none does), ``"sum"``, or ``"none"``: the shape of
            `labels`, 0 where a token does not count.
        num_items: with ``"mean"``, what the sum is divided by instead of the number of tokens that count.
        shift: token t is to predict label t + 1, along the last dimension of `labels`.
        label_smoothing: share of the target that is spread over the vocabulary, 0 to 1.
        z_loss: weight of ``logsumexp(logits) ** 2``, added per token.
        logit_softcap: c, for ``c * tanh(logits / c)``; default: none.
        logit_scale: factor of the logits, before the soft cap; default: 1.
        options: chunk sizes in bytes and the dtype that gradients are summed in; default: `ChunkedLoss()`.
        parameters: the tensors that train of a `head` that is a bare function; a module's are found.

    Returns:
        A number or (with ``"none"``) the shape of `labels`; float32, or float64 for such a head.

    Raises:
        ValueError, TypeError: any bad argument, labels of another shape than `hidden`, a label that is not a token (on the
            CPU; an accelerator stops the program), a head whose output is not (tokens, V).
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; it must be one of {', '.join(REDUCTIONS)}.")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"num_items divides the loss of reduction='mean', and reduction is {reduction!r}; drop one.")
    check_num_items(num_items)
    check_ignore_index(ignore_index)
    check_bool("shift", shift)
    check_fraction("label_smoothing", label_smoothing)
    options = chosen(options, chunk_tokens)
    hidden, labels = checked_inputs(hidden, labels)
    if shift:
        labels = shifted(labels, ignore_index)
    shape = shape_of(logit_scale, logit_softcap)
    rows = CrossEntropyRows(
        labels.reshape(-1), ignore_index, label_smoothing, checked_z_loss(z_loss), shape, options.compile
    )
    if reduction == "none":
        return losses_per_token(hidden, head, rows, options, parameters).view(labels.shape)
    if num_items is None:
        num_items = rows.counts.sum() if reduction == "mean" else 1
    return reduced(hidden, head, rows, rows.counts, num_items, options, parameters)


def chunked_log_probs(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
    shift: bool = False,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    logit_scale: float | None = None,
    options: ChunkedLoss | None = None,
    parameters: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """Log-probability of each label under ``softmax(head(hidden) / temperature)``, for preference losses.

    Backward runs the head once more, because what a loss makes of single tokens is known only then.

    >>> head = torch.nn.Linear(8, 100)
    >>> chunked_log_probs(torch.randn(2, 5, 8), head, torch.randint(100, (2, 5))).shape
    torch.Size([2, 5])

    Args:
        hidden, head, labels, chunk_tokens, ignore_index, shift, logit_softcap, logit_scale, options, parameters: as for
            `chunked_cross_entropy`; the temperature divides what the soft cap gives.

    Returns:
        float32, the shape of `labels`; 0 where the label is `ignore_index` (with `shift`, also in the last place).

    Raises:
        ValueError, TypeError: as `chunked_cross_entropy`.
    """
    check_ignore_index(ignore_index)
    check_bool("shift", shift)
    options = chosen(options, chunk_tokens)
    hidden, labels = checked_inputs(hidden, labels)
    if shift:
        labels = shifted(labels, ignore_index)
    shape = shape_of(logit_scale, logit_softcap, temperature)
    rows = CrossEntropyRows(labels.reshape(-1), ignore_index, 0.0, 0.0, shape, options.compile)
    return -losses_per_token(hidden, head, rows, options, parameters).view(labels.shape)


# Dynamo would unroll the chunks, and make a graph of every other number of tokens.
@torch.compiler.disable
def reduced(
    hidden: Tensor,
    head: Head,
    rows: CrossEntropyRows,
    counts: Tensor,
    num_items: int | float | Tensor,
    options: ChunkedLoss,
    parameters: tuple[Tensor, ...] | None,
    unit: Head | None = None,
) -> Tensor:
    """The sum of the losses of the tokens that count, divided by `num_items`.

    unit: where `head` is a function around a module, that module.
    """
    unit = head if unit is None else unit
    items = torch.as_tensor(num_items, dtype=torch.float32, device=hidden.device)
    scale = 1 / items
    one = torch.ones_like(scale)
    weights = counts.to(torch.float32)
    # float16 cannot hold a share of a mean: there backward divides, in float32.
    late = autocast_dtype(hidden) == torch.float16 or any(p.dtype == torch.float16 for p in _params(unit, parameters))
    weights, scale = (weights, scale) if late else (weights * scale, one)
    call = ChunkedCall(head, rows, options, unit)
    train = torch.is_grad_enabled()

    def inside(states: Tensor) -> Tensor:
        flat = states.reshape(-1, states.shape[-1])
        return LossInForward.apply(call, weights, scale, items, train, flat, *_params(unit, parameters))

    return call_in_fsdp_unit(unit, inside, hidden)


@torch.compiler.disable  # see `reduced`
def losses_per_token(
    hidden: Tensor,
    head: Head,
    rows: CrossEntropyRows,
    options: ChunkedLoss,
    parameters: tuple[Tensor, ...] | None,
    unit: Head | None = None,
) -> Tensor:
    """(tokens,) float32."""
    unit = head if unit is None else unit
    call = ChunkedCall(head, rows, options, unit)

    def inside(states: Tensor) -> Tensor:
        flat = states.reshape(-1, states.shape[-1])
        return LossesInBackward.apply(call, flat, *_params(unit, parameters))

    return call_in_fsdp_unit(unit, inside, hidden)


def _params(head: Head, tensors: tuple[Tensor, ...] | None) -> list[Tensor]:
    """Return the tensors of `head` that train; called inside an FSDP2 unit, where whole parameters replace the
    shards."""
    return trained_tensors(head) if tensors is None else [tensor for tensor in tensors if tensor.requires_grad]


def chosen(options: ChunkedLoss | None, chunk_tokens: int | None) -> ChunkedLoss:
    """`options`, or the defaults with `chunk_tokens`."""
    if options is None:
        return ChunkedLoss(chunk_tokens=chunk_tokens)
    if chunk_tokens is not None:
        raise ValueError("chunk_tokens and options are both given; write it in options=ChunkedLoss(chunk_tokens=...).")
    return options


def checked_inputs(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Both, if their shapes fit; a DTensor of whole hidden states as the plain tensor that it is."""
    check_hidden(hidden)
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels is {a_or_an(labels)}; it must be a tensor of token numbers.")
    if labels.is_floating_point() or labels.dtype in (torch.bool, torch.complex64):
        raise TypeError(f"labels has dtype {labels.dtype}; it must hold whole numbers, such as torch.int64.")
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} and hidden {tuple(hidden.shape)}; labels must have one number for "
            f"each hidden state: {tuple(hidden.shape[:-1])}."
        )
    if hidden.device != labels.device:
        raise ValueError(
            f"labels is on {labels.device} and hidden on {hidden.device}; move one: labels.to(hidden.device)."
        )
    return whole(hidden), whole(labels).long()


def check_hidden(hidden: Tensor) -> None:
    """Raise unless `hidden` is (..., D) of a floating-point dtype."""
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
        raise TypeError(
            f"hidden is {getattr(hidden, 'dtype', type(hidden).__name__)}; it must be a floating-point tensor."
        )
    if hidden.ndim < 2:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; it must be (..., width of the head's input).")


def whole(tensor: Tensor) -> Tensor:
    """`tensor`, or the plain one behind a DTensor that every rank holds whole."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise ValueError(
            f"A DTensor placed {tensor.placements} cannot be cut into chunks of tokens that every rank sees; "
            "redistribute it to Replicate() first."
        )
    return tensor.to_local()


def shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """Labels moved one to the left; the last place counts for nothing."""
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def check_num_items(num_items: object) -> None:
    """Raise unless the loss can be divided by `num_items`; of a tensor on an accelerator, this would wait for the device."""
    if num_items is None:
        return
    if isinstance(num_items, Tensor) and num_items.numel() == 1:
        if torch.compiler.is_compiling() or num_items.device.type != "cpu" or is_fake(num_items):
            return
        num_items = num_items.item()
    if isinstance(num_items, bool) or not isinstance(num_items, int | float):
        raise TypeError(f"num_items is {num_items!r}; it must be a number, or a tensor of one number.")
    if not 0 < num_items < math.inf:
        raise ValueError(
            f"num_items is {num_items!r}; it must be finite and > 0: the sum of the losses is divided by it."
        )


def check_ignore_index(ignore_index: object) -> None:
    """Raise unless `ignore_index` is a number that a label can be."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index is {ignore_index!r}; it must be a whole number, as labels are.")


def shape_of(scale: float | None, cap: float | None, temperature: float = 1.0) -> Shape:
    """Return what is done to the logits, if anything."""
    for name, value in (("logit_softcap", cap), ("temperature", temperature)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value!r}; it must be > 0.")
    if isinstance(scale, float) and not math.isfinite(scale):
        raise ValueError(f"logit_scale is {scale!r}; it must be finite.")
    return Shape(scale, cap, None if temperature == 1 else 1 / temperature)


def check_fraction(name: str, value: float) -> None:
    """Raise unless `value` is in 0 ... 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r}; it must be between 0 and 1.")


def checked_z_loss(z_loss: float) -> float:
    """`z_loss`, if it is a weight."""
    if not z_loss >= 0:
        raise ValueError(f"z_loss is {z_loss!r}; it must be >= 0.")
    return z_loss
