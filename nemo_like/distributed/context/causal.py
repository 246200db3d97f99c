"""Causal attention of a part's queries over the whole sequence: by blocks of keys, each in one fused kernel.

A query sees its own chunk of the sequence up to itself, and all of the chunks before. So each block is either causal and
square, or has no mask: no kernel is given one. Softmax over blocks is put together by their log-sum-exps, so the result is
exact (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Keys and values keep their number of
heads. They are saved as this rank's part: backward gets those of the other ranks once more.

Which blocks come when, and from which rank, is up to the method (`ContextMethod.blocks`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_like.activation_checkpointing.ops import OpFacts, declare
from nemo_like.distributed.context.methods import method_of
from nemo_like.distributed.context.parts import Attention
from nemo_like.torch_compat import fused_attention_kernel


def causal_attention_of(call: Attention) -> Tensor | None:
    """Return the states (B, H, L, D) of `call` over the whole sequence. None: it is not causal attention alone, without a
    mask, dropout, soft cap or sinks."""
    query, key, value, others = call.query, call.key, call.value, call.arguments
    more = ("s_aux", "softcap", "dropout", "dropout_p")
    if not call.causal or not call.fused or query.ndim != 4 or any(others.get(name) for name in more):
        return None
    if query.shape[2] != key.shape[2] or key.shape[:3] != value.shape[:3] or query.shape[1] % key.shape[1]:
        return None
    scale = others.get("scaling", others.get("scale"))
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8  # kernels take one width, of a multiple of 8
    padded = (F.pad(states, (0, width - states.shape[-1])) for states in (query, key, value))
    parts = call.parts
    out, _ = causal_attention(*padded, scale, parts.method.word, parts.rank, parts.ranks, parts.group)
    return out[..., : value.shape[-1]]


@torch.library.custom_op("nemo_like::causal_attention", mutates_args=())
def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, method: str, rank: int, ranks: int, group: str
) -> tuple[Tensor, Tensor]:
    """Causal attention of a part's queries over the whole sequence. A collective.

    Args:
        query: (B, H, L, D) of this rank's two chunks. key, value: (B, KV heads, L, D), H a multiple of KV heads.
        method: a word of `ContextParallel.method`.

    Returns:
        (B, H, L, D) in the queries' dtype, and the log-sum-exp of each query's scores, (B, H, L), at least float32.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros_like(query, dtype=wide)
    total = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)
    for rows, states, causal in method_of(method).blocks(torch.stack([key, value]), rank, ranks, group):
        _merge(
            out[:, :, rows], total[:, :, rows], *attend_block(query[:, :, rows], states[0], states[1], causal, scale)
        )
    return out.to(query.dtype), total


def _merge(out: Tensor, total: Tensor, part: Tensor, lse: Tensor) -> None:
    """Put the attention of some queries over more keys to what they have, in place."""
    after = torch.logaddexp(total, lse)
    out.mul_(total.sub_(after).exp_()[..., None]).addcmul_(part.to(out.dtype), (lse - after).exp_()[..., None])
    total.copy_(after)


@torch.library.custom_op("nemo_like::causal_attention_backward", mutates_args=())
def causal_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    total: Tensor,
    scale: float,
    method: str,
    rank: int,
    ranks: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of this rank's part. A collective."""
    of_query = torch.zeros_like(query, dtype=total.dtype)
    blocks = method_of(method).blocks(torch.stack([key, value]), rank, ranks, group, backward=True)
    grads: Any = None
    while True:
        try:
            rows, states, causal = blocks.send(grads)
        except StopIteration as ended:
            of_key, of_value = ended.value.to(key.dtype).unbind(0)
            return of_query.to(query.dtype), of_key.clone(), of_value.clone()
        grads = None  # before the next ones are made
        q, o, g, t = (tensor[:, :, rows] for tensor in (query, out, grad, total))
        grads = list(attend_block_backward(g, q, states[0], states[1], o, t, causal, scale))
        of_query[:, :, rows] += grads.pop(0)


@causal_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    total = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
    return query.new_empty(query.shape), total


@causal_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.rest = inputs[3:]


def _backward(ctx: Any, grad: Tensor, of_total: Tensor | None) -> tuple[Any, ...]:
    return *causal_attention_backward(grad, *ctx.saved_tensors, *ctx.rest), None, None, None, None, None


causal_attention.register_autograd(_backward, setup_context=_setup)


# One block. (B, H, L, D) queries over (B, KV heads, M, D) keys and values.


def attend_block(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exps (B, H, L), at least float32. causal: query i sees the keys up to i."""
    kernel = fused_attention_kernel(query, key, value, causal, scale)
    if kernel == "cpu":
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    elif kernel == "flash":
        out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    elif kernel == "cudnn":
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
    else:
        key, value = (_for_all(query, states) for states in (key, value))
        out = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
    # cuDNN has one more dimension, the memory-efficient kernel rows up to a multiple of 32.
    return out[0], out[1].flatten(2)[..., : query.shape[2]]


def attend_block_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; out, total: of the queries over all keys, not of this block's alone."""
    kernel = fused_attention_kernel(query, key, value, causal, scale)
    states, total = (grad.contiguous(), query, key, value, out.contiguous()), total.contiguous()
    if kernel == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *states, total, 0.0, causal, scale=scale
        )
    lengths, seed = (None, None, query.shape[2], key.shape[2]), total.new_zeros((), dtype=torch.int64)  # no dropout
    if kernel == "flash":
        seeds = seed.new_zeros(2).view(torch.uint64), seed.view(torch.uint64)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *states, total, *lengths, 0.0, causal, *seeds, scale=scale
        )
    elif kernel == "cudnn":
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *states, total[..., None], seed, seed, None, *lengths, 0.0, causal, scale=scale
        )
    else:
        wide = tuple(_for_all(query, states) for states in (key, value))
        total = F.pad(total, (0, -total.shape[-1] % 32), value=torch.inf)
        of_query, *of_states, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, query, *wide, None, out, total, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
        )
        grads = of_query, *(each.unflatten(1, (key.shape[1], -1)).sum(2) for each in of_states)
    return grads


def _for_all(query: Tensor, states: Tensor) -> Tensor:
    return states.repeat_interleave(query.shape[1] // states.shape[1], 1)


def _flops(op: object, args: tuple[Any, ...], kwargs: object, out: object) -> int:
    """A chunk at either end of the sequence sees as many keys on every rank: half of all."""
    query, ranks = args[0], args[6]
    return 2 * query.numel() * query.shape[2] * int(ranks)


def _scratch(args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes that a call, forward or backward, holds beyond its inputs and its output, which is made last."""
    backward = len(args) > 8
    query, key, *_, word, _, ranks, _ = args[1:] if backward else args
    method, sums = method_of(word), query.numel() * max(4, query.element_size())
    held = sums + method.held(2 * key.nbytes, ranks, backward) - query.nbytes
    if backward:  # of half of the rows, their gradient, and copies of their output's and of its gradient
        return int(held + 1.5 * query.nbytes - 2 * key.nbytes)
    return int(held + method.rows * (query.nbytes + sums))


declare(
    "nemo_like.causal_attention.default",
    OpFacts(
        saved=True,
        collective=True,
        attention=True,
        flops=_flops,
        gathered=lambda args: 2 * args[1].nbytes * int(args[6]),
        scratch=_scratch,
    ),
)
declare("nemo_like.causal_attention_backward.default", OpFacts(collective=True, scratch=_scratch))
