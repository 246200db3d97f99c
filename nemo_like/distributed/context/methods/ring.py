"""``ring``: keys and values go from rank to rank, and no rank ever holds those of the whole sequence.

With chunk r and the r-th chunk from the end on rank r, and a causal mask, what comes from rank o needs one of three
blocks: from the own rank a causal one; from a lower one its first chunk, seen by all queries; from a higher one both of
its chunks, seen by the second half of the queries. Softmax over blocks is put together by their log-sum-exps, so the result
is exact. In backward keys and values go round again, and their gradients with them, until they are back.

After Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023), and the balanced order of
Brandon et al., "Striped Attention" (2023), in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.activation_checkpointing.ops import OpFacts, declare
from nemo_like.distributed.context.attention import attention_of
from nemo_like.distributed.context.parts import Attention, ContextMethod, CutStack
from nemo_like.distributed.context.sequence_ops import find_group


class Ring(ContextMethod):
    """Causal self-attention without a mask, bias or dropout."""

    planned = False
    takes_masks = False

    def check(self, stack: CutStack, ranks: int) -> None:
        config: Any = getattr(stack.module, "config", None)
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        implementation = attention_of(config)
        why = None
        if implementation != "sdpa":
            why = f"has the attention implementation {implementation!r} (soft caps, sinks and biases need 'eager')"
        elif kinds:
            why = f"has layers of {sorted(kinds)[0]}"
        elif "encoder_hidden_states" in stack.arguments:
            why = "may look at an encoder's states"
        if why is not None:
            raise ValueError(
                f"method='ring' has causal self-attention alone, and {stack.name or 'the model'}, a "
                f"{type(stack.module).__name__}, {why}: use method='all_gather'."
            )

    def attend(self, call: Attention) -> Any:
        query, key, value = call.query, call.key, call.value
        others, fits = call.arguments, query.shape[2] == key.shape[2] and key.shape == value.shape
        plain = call.causal and call.fused and others.get("s_aux") is None and others.get("softcap") is None
        dropout = others.get("dropout") or others.get("dropout_p")
        if not plain or not fits or dropout or query.shape[1] % key.shape[1]:
            raise NotImplementedError(
                "method='ring' has causal self-attention alone, without a mask (padding, packed documents, sliding "
                "windows), bias, soft cap or dropout, with values as wide as keys; this layer requires more (queries "
                f"{tuple(query.shape)}, values {tuple(value.shape)}). Use method='all_gather'."
            )
        scale = others.get("scaling", others.get("scale"))
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        parts = call.parts
        return call.output(ring_attention(query, key, value, scale, parts.rank, parts.ranks, parts.group)[0])


METHOD = Ring()


def _exchange(sent: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[Any]]:
    """`sent` on its way to the next rank, and where that of the rank before arrives; wait for the works before reading."""
    ranks, rank = group.size(), group.rank()
    got = torch.empty_like(sent)
    to, of = (dist.get_global_rank(group, number % ranks) for number in (rank + 1, rank - 1))
    ops = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, got, of, group)]
    return got, dist.batch_isend_irecv(ops)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _blocks(rank: int, ranks: int, length: int) -> Iterator[tuple[slice, slice, bool]]:
    """For what comes from this rank, the one before, ...: (queries, keys, whether causal)."""
    half, everything = length // 2, slice(None)
    for step in range(ranks):
        of = (rank - step) % ranks
        if of == rank:
            yield everything, everything, True
        elif of < rank:
            yield everything, slice(0, half), False
        else:
            yield slice(half, None), everything, False


def _grouped(states: Tensor, groups: int) -> Tensor:
    return states if groups == 1 else states.repeat_interleave(groups, 1)


@torch.library.custom_op("nemo_like::ring_attention", mutates_args=())
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, rank: int, ranks: int, group: str
) -> tuple[Tensor, Tensor]:
    """Causal attention of a part's queries over the whole sequence. A collective.

    Args:
        query: (B, H, L, D) of this rank's two chunks. key, value: (B, KV heads, L, D), H a multiple of KV heads.

    Returns:
        (B, H, L, D) in the queries' dtype, and the log-sum-exp of each query's scores, (B, H, L), float32.
    """
    groups = query.shape[1] // key.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    total = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
    states = torch.stack([key, value])
    for step, (rows, columns, causal) in enumerate(_blocks(rank, ranks, query.shape[2])):
        got, works = _exchange(states, find_group(group)) if step < ranks - 1 else (states, [])
        k, v = (_grouped(side[:, :, columns], groups).contiguous() for side in states)
        part, lse = attention_block(query[:, :, rows].contiguous(), k, v, causal, scale)
        before = total[:, :, rows]
        after = torch.logaddexp(before, lse)
        out[:, :, rows] = (
            out[:, :, rows] * (before - after).exp()[..., None] + part.float() * (lse - after).exp()[..., None]
        )
        total[:, :, rows] = after
        _wait(works)
        states = got
    return out.to(query.dtype), total


@torch.library.custom_op("nemo_like::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    total: Tensor,
    scale: float,
    rank: int,
    ranks: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of this rank's part. A collective."""
    groups, process_group = query.shape[1] // key.shape[1], find_group(group)
    of_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    states = torch.stack([key, value])
    of_states = torch.zeros(states.shape, dtype=torch.float32, device=query.device)
    for step, (rows, columns, causal) in enumerate(_blocks(rank, ranks, query.shape[2])):
        got, works = _exchange(states, process_group) if step < ranks - 1 else (states, [])
        k, v = (_grouped(side[:, :, columns], groups).contiguous() for side in states)
        q, o, g = (tensor[:, :, rows].contiguous() for tensor in (query, out, grad))
        dq, dk, dv = attention_block_backward(g, q, k, v, o, total[:, :, rows].contiguous(), causal, scale)
        of_query[:, :, rows] += dq
        for side, part in zip(of_states, (dk, dv)):
            side[:, :, columns] += part if groups == 1 else part.unflatten(1, (-1, groups)).sum(2)
        _wait(works)
        states = got
        # After the last step it comes to the rank whose keys and values it is of.
        of_states, works = _exchange(of_states, process_group)
        _wait(works)
    of_key, of_value = of_states.to(key.dtype).clone().unbind(0)
    return of_query.to(query.dtype), of_key.clone(), of_value.clone()


@ring_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *places: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


@ring_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.rest = inputs[3:]


def _backward(ctx: Any, grad: Tensor, of_total: Tensor | None) -> tuple[Any, ...]:
    return *ring_attention_backward(grad, *ctx.saved_tensors, *ctx.rest), None, None, None, None


ring_attention.register_autograd(_backward, setup_context=_setup)
declare("nemo_like.ring_attention.default", OpFacts(saved=True, collective=True))


# Attention of some queries over some keys, with its log-sum-exps: what ring attention is put together from. By tiles of
# plain products in float32: exact on any device, though slower than a fused kernel. It was not run on CUDA.

_TILE = 512
"""Queries at a time, so that scores are (B, H, 512, keys)."""


def attention_block(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(B, H, L, D) queries over (B, H, M, D) keys and values: the output, and (B, H, L) log-sum-exps in float32.

    causal: query i sees the keys up to i; L is M then.
    """
    outs, totals = [], []
    for first in range(0, query.shape[2], _TILE):
        scores = _scores(query[:, :, first : first + _TILE], key, first, causal, scale)
        total = scores.logsumexp(-1)
        outs.append((scores - total[..., None]).exp() @ value.float())
        totals.append(total)
    return torch.cat(outs, 2).to(query.dtype), torch.cat(totals, 2)


def attention_block_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; out, total: of the queries over all keys, not of this block's alone."""
    of_key, of_value = (torch.zeros(key.shape, dtype=torch.float32, device=key.device) for _ in range(2))
    of_query = []
    for first in range(0, query.shape[2], _TILE):
        rows = slice(first, first + _TILE)
        q, g, o = query[:, :, rows].float(), grad[:, :, rows].float(), out[:, :, rows].float()
        weights = (_scores(q, key, first, causal, scale) - total[:, :, rows, None]).exp()
        of_value += weights.transpose(-1, -2) @ g
        of_weights = g @ value.float().transpose(-1, -2) - (g * o).sum(-1, keepdim=True)
        of_scores = weights * of_weights * scale
        of_query.append(of_scores @ key.float())
        of_key += of_scores.transpose(-1, -2) @ q
    return torch.cat(of_query, 2), of_key, of_value


def _scores(query: Tensor, key: Tensor, first: int, causal: bool, scale: float) -> Tensor:
    """Return the scores of queries from number `first` on, float32."""
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if not causal:
        return scores
    rows = torch.arange(first, first + query.shape[2], device=query.device)
    hidden = torch.arange(key.shape[2], device=query.device) > rows[:, None]
    return scores.masked_fill(hidden, -torch.inf)
