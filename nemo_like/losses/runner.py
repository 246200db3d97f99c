"""Head and loss, one chunk of tokens after the other, as one node of autograd's graph.

The node's inputs are the hidden states and the head's parameters, so that each parameter gets one gradient per
backward, as FSDP2's and DDP's reductions want it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from nemo_like._util.words import a_or_an
from nemo_like.losses.heads import AutogradHead, GradientSums, Head, LinearHead, like_logits, open_head, unwrap_logits
from nemo_like.losses.rows import CrossEntropyRows, pieces
from nemo_like.options import ChunkedLoss
from nemo_like.torch_compat import graph_is_kept, is_fake, without_fsdp_hooks


@dataclass(frozen=True)
class ChunkedCall:
    """One call: which head, which loss, how it is cut."""

    head: Head
    rows: CrossEntropyRows
    options: ChunkedLoss
    unit: Any
    """The module whose FSDP2 hooks have gathered the head's parameters: the head, or what `head` calls."""

    def __post_init__(self) -> None:
        if not callable(self.head):
            raise TypeError(
                f"head is {a_or_an(self.head)}; it must be a module or a function from hidden states to logits. Of "
                "a weight, make one: head=lambda x: F.linear(x, weight), parameters=(weight,)."
            )

    def open(self, hidden: Tensor, params: Sequence[Tensor]) -> tuple[AutogradHead | LinearHead, int]:
        """The head and the tokens of one chunk; where its width is not known, it runs one token."""
        head = open_head(self.head, params, 0)
        if isinstance(head, LinearHead):
            head.check(hidden)
            size, per_token = head.width, head.bytes_per_token
        else:
            probe = hidden.detach()[:1]
            with _RandomState.now(hidden).again():
                logits, vocabulary = unwrap_logits(head.logits(probe, False), len(probe))
            size, per_token = vocabulary.size, logits.shape[1] * logits.element_size()
        self.rows.check(size)
        tokens = min(self.options.tokens(per_token), max(1, len(hidden)))
        if isinstance(head, LinearHead):
            head.block_bytes = max(1, tokens * per_token // 64)
        return head, tokens


@dataclass
class Outcome:
    """The results of one walk over the chunks."""

    losses: Tensor
    """(tokens,), float32."""
    hidden: Tensor | None
    params: list[Tensor | None]


def walk(
    call: ChunkedCall, hidden: Tensor, params: Sequence[Tensor], weights: Tensor | None, into_hidden: bool
) -> Outcome:
    """All chunks: the losses and, with `weights`, the gradients of ``(weights * losses).sum()``.

    hidden: (tokens, D), weights: (tokens,) float32 or None.
    """
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
    return Outcome(total, to_hidden, sums.sums)


class LossInForward(torch.autograd.Function):
    """``losses.sum() / items`` with its gradients, scale * those of (weights * losses).sum(), made in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        call: ChunkedCall,
        weights: Tensor,
        scale: Tensor,
        items: Tensor,
        train: bool,
        hidden: Tensor,
        *params: Tensor,
    ) -> Tensor:
        into_hidden = train and ctx.needs_input_grad[5]
        outputs = walk(call, hidden, params if train else (), weights if train else None, into_hidden)
        grads = [outputs.hidden, *outputs.params]
        ctx.kept = [index for index, grad in enumerate(grads) if grad is not None]
        ctx.dtypes = [tensor.dtype for tensor in (hidden, *params)]
        ctx.inputs = len(params) + 1
        ctx.save_for_backward(scale, *(grads[index] for index in ctx.kept))
        # In float64, and rounded once: a sum of many tokens in float32 ends some units off in the last place.
        wide = torch.float32 if outputs.losses.device.type == "mps" else torch.float64
        return (outputs.losses.sum(dtype=wide) / items).to(outputs.losses.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        lse, *saved = ctx.saved_tensors
        factor = upstream * lse.nan_to_num(posinf=0.0)  # no token counts: the loss is NaN, and nothing has a gradient
        in_place = graph_is_kept() is False
        unchanged = factor.device.type == "cpu" and not is_fake(factor) and factor.item() == 1
        grads: list[Tensor | None] = [None] * ctx.inputs
        for index, grad in zip(ctx.kept, saved, strict=True):
            if not unchanged:
                grad = grad.detach().mul_(factor) if in_place else grad * factor
            elif not in_place and grad.dtype == ctx.dtypes[index]:
                grad = grad.clone()  # a `.grad` of the caller's own, while the graph keeps ours
            grads[index] = grad.to(ctx.dtypes[index])
        return None, None, None, None, None, *grads


class LossesInBackward(torch.autograd.Function):
    """The losses of single tokens. What weighs them is known in backward only, which runs the head once more."""

    @staticmethod
    def forward(ctx: Any, call: ChunkedCall, hidden: Tensor, *params: Tensor) -> Tensor:
        ctx.call = call
        ctx.autocast = _Autocast.now(hidden)
        ctx.random = _RandomState.now(hidden)
        ctx.save_for_backward(hidden, *params)
        return walk(call, hidden, (), None, False).losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        hidden, *params = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        with ctx.autocast.again(), ctx.random.again(), without_fsdp_hooks(ctx.call.unit):
            outputs = walk(ctx.call, hidden, params, upstream, needs[0])
        grads = [
            None if grad is None else grad.to(param.dtype) for grad, param in zip(outputs.params, params, strict=True)
        ]
        return None, outputs.hidden, *grads


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():  # in a backward: create_graph=True
        raise RuntimeError(
            "A chunked loss has first derivatives only, and this backward was asked to make a graph of its own "
            "(create_graph=True); compute the loss from whole logits for second ones."
        )


@dataclass(frozen=True)
class _Autocast:
    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, tensor: Tensor) -> _Autocast:
        kind = tensor.device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled)


@dataclass(frozen=True)
class _RandomState:
    """Dropout inside a head must draw in backward what it drew in forward."""

    cpu: Tensor
    devices: Any
    kind: str

    @classmethod
    def now(cls, tensor: Tensor) -> _RandomState:
        return cls(torch.get_rng_state(), get_device_states(tensor), tensor.device.type)

    @contextlib.contextmanager
    def again(self) -> Any:
        ids, states = self.devices
        with torch.random.fork_rng(ids, device_type=self.kind if self.kind != "cpu" else "cuda"):
            torch.set_rng_state(self.cpu)
            if ids:
                set_device_states(ids, states, device_type=self.kind)
            yield
