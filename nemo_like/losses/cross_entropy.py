"""`chunked_cross_entropy` and `chunked_log_probs`: from hidden states and labels, without the logits of all tokens."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import get_device_states, set_device_states

from nemo_like._util.tensors import autocast_dtype
from nemo_like._util.words import a_or_an, check_bool
from nemo_like.losses.heads import (
    AutogradHead,
    GradientSums,
    Head,
    LinearHead,
    is_plain_linear,
    like_logits,
    unwrap_logits,
)
from nemo_like.losses.rows import CrossEntropyRows, Shape, pieces
from nemo_like.options import ChunkedLoss
from nemo_like.torch_compat import call_in_fsdp_unit, graph_is_kept, is_fake, uncompiled, without_fsdp_hooks

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
        num_items: with ``"mean"``, the divisor of the sum instead of the number of tokens that count.
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
    if num_items is not None:
        if reduction != "mean":
            raise ValueError(
                f"num_items divides the loss of reduction='mean', and reduction is {reduction!r}; drop one."
            )
        _check_num_items(num_items)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing!r}; it must be between 0 and 1.")
    if not z_loss >= 0:
        raise ValueError(f"z_loss is {z_loss!r}; it must be >= 0.")
    options = _options(options, chunk_tokens)
    hidden, labels = _inputs(hidden, labels, ignore_index, shift)
    shape = _shape(logit_scale, logit_softcap)
    rows = CrossEntropyRows(labels.reshape(-1), ignore_index, label_smoothing, z_loss, shape, options.compile)
    call = ChunkedCall(head, rows, options, head)
    if reduction == "none":
        return losses_per_token(call, hidden, parameters).view(labels.shape)
    if num_items is None:
        num_items = rows.counts.sum() if reduction == "mean" else 1
    return reduced(call, hidden, num_items, parameters)


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

    Backward runs the head once more, because the gradients of single tokens are known only then.

    >>> head = torch.nn.Linear(8, 100)
    >>> chunked_log_probs(torch.randn(2, 5, 8), head, torch.randint(100, (2, 5))).shape
    torch.Size([2, 5])

    Args:
        hidden, head, labels, chunk_tokens, ignore_index, shift, logit_softcap, logit_scale, options, parameters: as for
            `chunked_cross_entropy`; the temperature divides the output of the soft cap.

    Returns:
        float32, the shape of `labels`; 0 where the label is `ignore_index` (with `shift`, also in the last place).

    Raises:
        ValueError, TypeError: as `chunked_cross_entropy`.
    """
    options = _options(options, chunk_tokens)
    hidden, labels = _inputs(hidden, labels, ignore_index, shift)
    shape = _shape(logit_scale, logit_softcap, temperature)
    rows = CrossEntropyRows(labels.reshape(-1), ignore_index, 0.0, 0.0, shape, options.compile)
    return -losses_per_token(ChunkedCall(head, rows, options, head), hidden, parameters).view(labels.shape)


# Dynamo would unroll the chunks, and make a graph of every other number of tokens.
@uncompiled
def reduced(
    call: ChunkedCall, hidden: Tensor, num_items: int | float | Tensor, parameters: tuple[Tensor, ...] | None = None
) -> Tensor:
    """The sum of the losses of the tokens that count, divided by `num_items`."""
    items = torch.as_tensor(num_items, dtype=torch.float32, device=hidden.device)
    scale = 1 / items
    weights = call.rows.counts.to(torch.float32)
    # float16 cannot hold a share of a mean: there backward divides, in float32.
    late = autocast_dtype(hidden) == torch.float16
    if not late and all(param.dtype != torch.float16 for param in _params(call, parameters)):
        weights, scale = weights * scale, torch.ones_like(scale)
    train = torch.is_grad_enabled()

    def inside(states: Tensor) -> Tensor:
        flat = states.reshape(-1, states.shape[-1])
        return LossInForward.apply(call, weights, scale, items, train, flat, *_params(call, parameters))

    return call_in_fsdp_unit(call.unit, inside, hidden)


@uncompiled  # see `reduced`
def losses_per_token(call: ChunkedCall, hidden: Tensor, parameters: tuple[Tensor, ...] | None = None) -> Tensor:
    """(tokens,) float32."""

    def inside(states: Tensor) -> Tensor:
        return LossesInBackward.apply(call, states.reshape(-1, states.shape[-1]), *_params(call, parameters))

    return call_in_fsdp_unit(call.unit, inside, hidden)


def _params(call: ChunkedCall, tensors: tuple[Tensor, ...] | None) -> list[Tensor]:
    """Return the tensors that train; called inside an FSDP2 unit, where whole parameters replace the shards."""
    if tensors is None:
        tensors = tuple(call.unit.parameters()) if isinstance(call.unit, nn.Module) else ()
    return [tensor for tensor in tensors if tensor.requires_grad]


def _options(options: ChunkedLoss | None, chunk_tokens: int | None) -> ChunkedLoss:
    """`options`, or the defaults with `chunk_tokens`."""
    if options is None:
        return ChunkedLoss(chunk_tokens=chunk_tokens)
    if chunk_tokens is not None:
        raise ValueError("chunk_tokens and options are both given; write it in options=ChunkedLoss(chunk_tokens=...).")
    return options


def _inputs(hidden: Tensor, labels: Tensor, ignore_index: int, shift: bool) -> tuple[Tensor, Tensor]:
    """Both, if their shapes fit, labels shifted; a DTensor of whole hidden states as the plain tensor that it is."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index is {ignore_index!r}; it must be a whole number, as labels are.")
    check_bool("shift", shift)
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
        raise TypeError(
            f"hidden is {getattr(hidden, 'dtype', type(hidden).__name__)}; it must be a floating-point tensor."
        )
    if hidden.ndim < 2:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; it must be (..., width of the head's input).")
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
    labels = whole(labels).long()
    if shift:  # one to the left; the last place counts for nothing
        labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    return whole(hidden), labels


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


def _check_num_items(num_items: object) -> None:
    """Raise unless the loss can be divided by `num_items`; of a tensor on an accelerator, this would wait for the device."""
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


def _shape(scale: float | None, cap: float | None, temperature: float = 1.0) -> Shape:
    """Return the scale, soft cap and temperature of the logits."""
    for name, value in (("logit_softcap", cap), ("temperature", temperature)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value!r}; it must be > 0.")
    if isinstance(scale, float) and not math.isfinite(scale):
        raise ValueError(f"logit_scale is {scale!r}; it must be finite.")
    return Shape(scale, cap, None if temperature == 1 else 1 / temperature)


# Head and loss, one chunk of tokens after the other, as one node of autograd's graph.
#
# The node's inputs are the hidden states and the head's parameters, so that each parameter gets one gradient per
# backward, as FSDP2's and DDP's reductions want it.


@dataclass(frozen=True)
class ChunkedCall:
    """One call: its head, its loss, and how it is cut."""

    head: Head
    rows: CrossEntropyRows
    options: ChunkedLoss
    unit: Any  # The module whose FSDP2 hooks have gathered the head's parameters: the head, or one that `head` calls.

    def __post_init__(self) -> None:
        if not callable(self.head):
            raise TypeError(
                f"head is {a_or_an(self.head)}; it must be a module or a function from hidden states to logits. Of "
                "a weight, make one: head=lambda x: F.linear(x, weight), parameters=(weight,)."
            )

    def open(self, hidden: Tensor, params: Sequence[Tensor]) -> tuple[AutogradHead | LinearHead, int]:
        """The head and the tokens of one chunk; where its width is not known, it runs one token."""
        head: AutogradHead | LinearHead
        if isinstance(self.head, nn.Linear) and is_plain_linear(self.head):
            head = LinearHead(self.head, params)
            size, per_token = head.check(hidden)
        else:
            head, probe = AutogradHead(self.head, params), hidden.detach()[:1]
            with _random_numbers_of_now(hidden)():
                logits, vocabulary = unwrap_logits(head.logits(probe, False), len(probe))
            size, per_token = vocabulary.size, logits.shape[1] * logits.element_size()
        self.rows.check(size)
        tokens = min(self.options.tokens(per_token), max(1, len(hidden)))
        if isinstance(head, LinearHead):
            head.block_bytes = max(1, tokens * per_token // 64)
        return head, tokens


def walk(
    call: ChunkedCall,
    hidden: Tensor,  # (tokens, D)
    params: Sequence[Tensor],
    weights: Tensor | None,  # (tokens,) float32
    into_hidden: bool,
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """All chunks: the losses, (tokens,) float32, and, with `weights`, the gradients of ``(weights * losses).sum()``, of
    `hidden` and of `params`."""
    head, size = call.open(hidden, params)
    with_gradient = weights is not None and (into_hidden or bool(params))
    sums = GradientSums(params, call.options.grads_in_float32)
    to_hidden = (
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if with_gradient and into_hidden else None
    )
    total = hidden.new_zeros(len(hidden), dtype=torch.float32)
    for rows in pieces(len(hidden), size, hidden):
        chunk = hidden[rows]
        output = head.logits(chunk, with_gradient)
        logits, vocabulary = unwrap_logits(output, len(chunk))
        mine = weights[rows] if with_gradient and weights is not None else None
        losses, sparse = call.rows.step(logits, rows, vocabulary, mine, isinstance(head, LinearHead))
        total = total.to(losses.dtype)  # float64 stays
        total[rows] = losses
        if with_gradient:
            into = None if to_hidden is None else to_hidden[rows]
            head.backward(like_logits(logits, output), sparse, chunk, into, sums)
        del output, logits  # before the next chunk's are made
    return total, to_hidden, sums.sums


class LossInForward(torch.autograd.Function):
    """``losses.sum() / items`` with its gradients, scale * those of (weights * losses).sum(), made in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        call: ChunkedCall,
        weights: Tensor,  # (tokens,)
        scale: Tensor,  # ()
        items: Tensor,  # ()
        train: bool,
        hidden: Tensor,  # (tokens, D)
        *params: Tensor,
    ) -> Tensor:
        into_hidden = train and ctx.needs_input_grad[5]
        results = walk(call, hidden, params if train else (), weights if train else None, into_hidden)
        losses, grads = results[0], [results[1], *results[2]]
        ctx.kept = [index for index, grad in enumerate(grads) if grad is not None]
        ctx.dtypes = [tensor.dtype for tensor in (hidden, *params)]
        ctx.save_for_backward(scale, *(grads[index] for index in ctx.kept))
        # In float64, and rounded once: a sum of many tokens in float32 ends some units off in the last place.
        wide = torch.float32 if losses.device.type == "mps" else torch.float64
        return (losses.sum(dtype=wide) / items).to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        lse, *saved = ctx.saved_tensors
        factor = upstream * lse.nan_to_num(posinf=0.0)  # no token counts: the loss is NaN, and nothing has a gradient
        in_place = graph_is_kept() is False
        unchanged = factor.device.type == "cpu" and not is_fake(factor) and factor.item() == 1
        grads: list[Tensor | None] = [None] * len(ctx.dtypes)
        for index, grad in zip(ctx.kept, saved, strict=True):
            if not unchanged:
                grad = grad.detach().mul_(factor) if in_place else grad * factor
            elif not in_place and grad.dtype == ctx.dtypes[index]:
                grad = grad.clone()  # a `.grad` of the caller's own, while the graph keeps ours
            grads[index] = grad.to(ctx.dtypes[index])
        return None, None, None, None, None, *grads


class LossesInBackward(torch.autograd.Function):
    """The losses of single tokens. Their weights are known in backward only, which runs the head once more."""

    @staticmethod
    def forward(ctx: Any, call: ChunkedCall, hidden: Tensor, *params: Tensor) -> Tensor:
        ctx.call = call
        kind = hidden.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        ctx.autocast = functools.partial(torch.autocast, kind, dtype=dtype, enabled=enabled)
        ctx.random = _random_numbers_of_now(hidden)
        ctx.save_for_backward(hidden, *params)
        return walk(call, hidden, (), None, False)[0]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        hidden, *params = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        with ctx.autocast(), ctx.random(), without_fsdp_hooks(ctx.call.unit):
            _, to_hidden, of_params = walk(ctx.call, hidden, params, upstream, needs[0])
        grads = [None if grad is None else grad.to(param.dtype) for grad, param in zip(of_params, params, strict=True)]
        return None, to_hidden, *grads


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():  # in a backward: create_graph=True
        raise RuntimeError(
            "A chunked loss has first derivatives only, and this backward was asked to make a graph of its own "
            "(create_graph=True); compute the loss from whole logits for second ones."
        )


def _random_numbers_of_now(tensor: Tensor) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context in which dropout inside a head draws the same as now: in backward, the numbers of forward."""
    cpu, (ids, states), kind = torch.get_rng_state(), get_device_states(tensor), tensor.device.type

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(ids, device_type=kind if kind != "cpu" else "cuda"):
            torch.set_rng_state(cpu)
            if ids:
                set_device_states(ids, states, device_type=kind)
            yield

    return again
