"""Ways in which the queries of a rank meet the keys of the others: one object of `METHODS` for each word of
`ContextParallel.method`; and causal attention by blocks of keys, each in one fused kernel, which two of them share.

A query sees its own chunk of the sequence up to itself, and all of the chunks before. So each block is either causal and
square, or has no mask: no kernel is given one. Softmax over blocks is put together by their log-sum-exps, so the result is
exact (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Keys and values keep their number of
heads. They are saved as this rank's part: backward gets those of the other ranks once more.

Which blocks come when, and from which rank, is up to the method (`ContextMethod.blocks`). The operators that a method
sends with define the bytes that plans count for them (`sequence_ops`).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemo_like._util.log import say_once
from nemo_like._util.words import a_or_an
from nemo_like.activation_checkpointing.ops import OpFacts, declare
from nemo_like.distributed.context.attention import OfTransformers, attention_of, causal_mask, uses_interface
from nemo_like.distributed.context.parts import Attention, Blocks, ContextMethod, CutStack
from nemo_like.distributed.context.sequence_ops import find_group, heads_for_sequence, sequence_for_heads
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
    for rows, states, causal in METHODS[method].blocks(torch.stack([key, value]), rank, ranks, group):
        _merge(
            out[:, :, rows], total[:, :, rows], *attend_block(query[:, :, rows], states[0], states[1], causal, scale)
        )
    return out.to(query.dtype), total


def _merge(
    out: Tensor,  # (B, H, rows, D)
    total: Tensor,  # (B, H, rows)
    part: Tensor,  # (B, H, rows, D)
    lse: Tensor,  # (B, H, rows)
) -> None:
    """Merge the attention of some queries over more keys into theirs so far, in place."""
    after = torch.logaddexp(total, lse)
    out.mul_(total.sub_(after).exp_()[..., None]).addcmul_(part.to(out.dtype), (lse - after).exp_()[..., None])
    total.copy_(after)


@torch.library.custom_op("nemo_like::causal_attention_backward", mutates_args=())
def causal_attention_backward(
    grad: Tensor,  # (B, H, L, D)
    query: Tensor,  # (B, H, L, D)
    key: Tensor,  # (B, KV heads, L, D)
    value: Tensor,  # (B, KV heads, L, D)
    out: Tensor,  # (B, H, L, D)
    total: Tensor,  # (B, H, L), log-sum-exps over all keys
    scale: float,
    method: str,
    rank: int,
    ranks: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of this rank's part. A collective."""
    of_query = torch.zeros_like(query, dtype=total.dtype)
    blocks = METHODS[method].blocks(torch.stack([key, value]), rank, ranks, group, backward=True)
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


def attend_block(
    query: Tensor,  # (B, H, L, D)
    key: Tensor,  # (B, KV heads, M, D)
    value: Tensor,  # (B, KV heads, M, D)
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
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
    grad: Tensor,  # (B, H, L, D)
    query: Tensor,  # (B, H, L, D)
    key: Tensor,  # (B, KV heads, M, D)
    value: Tensor,  # (B, KV heads, M, D)
    out: Tensor,  # (B, H, L, D)
    total: Tensor,  # (B, H, L)
    causal: bool,
    scale: float,
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
            states[0],
            query,
            *wide,
            None,
            states[-1],
            total,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
        grads = of_query, *(each.unflatten(1, (key.shape[1], -1)).sum(2) for each in of_states)
    return grads


def _for_all(
    query: Tensor,  # (B, H, L, D)
    states: Tensor,  # (B, KV heads, M, D)
) -> Tensor:
    """Return keys or values of every query head: (B, H, M, D)."""
    return states.repeat_interleave(query.shape[1] // states.shape[1], 1)


def _flops(op: object, args: tuple[Any, ...], kwargs: object, out: object) -> int:
    """A chunk at either end of the sequence sees as many keys on every rank: half of all."""
    query, ranks = args[0], args[6]
    return 2 * query.numel() * query.shape[2] * int(ranks)


def _scratch(args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes that a call, forward or backward, holds beyond its inputs and its output, which is made last."""
    backward = len(args) > 8
    query, key, *_, word, _, ranks, _ = args[1:] if backward else args
    method, sums = METHODS[word], query.numel() * max(4, query.element_size())
    held = sums + method.held(2 * key.nbytes, ranks, backward) - query.nbytes
    if backward:  # of half of the rows, their gradient, and copies of their output's and of its gradient
        return int(held + 1.5 * query.nbytes - 2 * key.nbytes)
    return int(held + method.rows * (query.nbytes + sums))


declare(
    "nemo_like.causal_attention.default",
    OpFacts(
        saved=True,
        collective=True,
        attention="sdpa",
        flops=_flops,
        gathered=lambda args: 2 * args[1].nbytes * int(args[6]),
        scratch=_scratch,
    ),
)
declare("nemo_like.causal_attention_backward.default", OpFacts(collective=True, scratch=_scratch))


# ``all_gather``: each rank gathers the keys and values of the whole sequence, for any attention.
#
# Causal attention runs its own keys first, while those of the others are on their way. They come in the order of the
# ranks, chunks from the front and chunks from the back apart, and stay in it: no query minds the order of the keys before
# its chunk.


class GatherKeys(ContextMethod):
    """This rank's queries over all keys."""

    word = "all_gather"
    rows = 0.5

    def attend(self, call: Attention) -> Any:
        if (states := causal_attention_of(call)) is not None:
            return call.output(states)
        parts, mask = call.parts, call.mask
        widths = call.key.shape[-1], call.value.shape[-1]
        whole = parts.gather(torch.cat([call.key, call.value], -1), call.key.ndim - 2)
        if call.causal:
            if call.fused:
                say_once(
                    "Attention with dropout under cp makes a mask of a rank's tokens by all: it takes memory and time."
                )
            mask = causal_mask(parts, whole.shape[-2], call.query)
        key, value = whole.split(widths, -1)
        return call.run(call.query, key.to(call.key.dtype), value.to(call.value.dtype), mask)

    def blocks(self, part: Tensor, rank: int, ranks: int, group: str, backward: bool = False) -> Blocks:
        half = part.shape[3] // 2
        halves = slice(None, half), slice(half, None)
        sent = [part[:, :, :, rows].permute(3, 0, 1, 2, 4).contiguous() for rows in halves]  # (chunk, 2, B, heads, D)
        got = [chunk.new_empty((ranks * half, *chunk.shape[1:])) for chunk in sent]
        ranks_of = find_group(group)
        works = [dist.all_gather_single(*pair, ranks_of, async_op=True) for pair in zip(got, sent)]
        of_own = []
        for rows in halves:
            of_own.append((yield rows, part[:, :, :, rows], True))
        # The chunks from the front: before this rank's first one are `rank` of them, before its second one all. From the
        # back: before its second one are those of the higher ranks.
        front, back = slice(None, rank * half), slice((rank + 1) * half, None)
        seen = [[(halves[0], front), (halves[1], slice(None))], [(halves[1], back)]]
        parts, reduced = [], []
        for number, blocks in enumerate(seen):
            works[number].wait()
            chunks = got.pop(0)
            whole, sums = chunks.permute(1, 2, 3, 0, 4), torch.zeros_like(chunks) if backward else None
            for rows, columns in blocks:
                if not whole[:, :, :, columns].shape[3]:
                    continue
                if sums is None:
                    yield rows, whole[:, :, :, columns], False
                else:
                    _add(sums[columns], (yield rows, whole[:, :, :, columns], False))
            if sums is not None:
                _add(sums[rank * half : (rank + 1) * half], of_own.pop(0))
                parts.append(torch.empty_like(sent[number]))
                reduced.append(dist.reduce_scatter_single(parts[-1], sums, group=ranks_of, async_op=True))
            del chunks, whole, sums
        if not backward:
            return None
        for work in reduced:
            work.wait()
        return torch.cat(parts).permute(1, 2, 3, 0, 4)

    def held(self, part: int, ranks: int, backward: bool) -> int:
        return (3 + 2 * ranks if backward else 2 + ranks) * part


def _add(sums: Tensor, grads: Any) -> None:
    """Add gradients of keys and of values, (B, heads, M, D) each, to sums (M, 2, B, heads, D)."""
    for number, grad in enumerate(grads):
        sums[:, number] += grad.permute(2, 0, 1, 3)


# ``ring``: keys and values go from rank to rank, and no rank ever holds those of the whole sequence.
#
# With chunk r and the r-th chunk from the end on rank r, and a causal mask, keys and values of rank o need one of three
# blocks: from the own rank a causal one; from a lower one its first chunk, seen by all queries; from a higher one both of
# its chunks, seen by the second half of the queries. In backward keys and values go round again, and their gradients with
# them, until they are back.
#
# After Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023), and the balanced order of
# Brandon et al., "Striped Attention" (2023), in chunks.


class Ring(ContextMethod):
    """Causal self-attention without a mask, bias or dropout."""

    word = "ring"
    takes_masks = False

    def check(self, stack: CutStack, ranks: int) -> None:
        config: Any = getattr(stack.module, "config", None)
        kind = min(set(getattr(config, "layer_types", None) or ()) - {"full_attention"}, default=None)
        implementation = attention_of(config)
        reasons = (
            (
                implementation != "sdpa",
                f"has the attention implementation {implementation!r} (soft caps, sinks and biases need 'eager')",
            ),
            (kind, f"has layers of {kind}"),
            ("encoder_hidden_states" in stack.arguments, "may look at an encoder's states"),
        )
        if why := next((why for holds, why in reasons if holds), None):
            raise ValueError(
                f"method='ring' has causal self-attention alone, and {stack.name or 'the model'}, a "
                f"{type(stack.module).__name__}, {why}: use method='all_gather'."
            )

    def attend(self, call: Attention) -> Any:
        states = causal_attention_of(call)
        if states is None:
            raise NotImplementedError(
                "method='ring' has causal self-attention alone, without a mask (padding, packed documents, sliding "
                "windows), bias, soft cap or dropout; this layer requires more (queries "
                f"{tuple(call.query.shape)}, values {tuple(call.value.shape)}). Use method='all_gather'."
            )
        return call.output(states)

    def blocks(self, part: Tensor, rank: int, ranks: int, group: str, backward: bool = False) -> Blocks:
        half, everything = part.shape[3] // 2, slice(None)
        sums = torch.zeros_like(part, dtype=torch.promote_types(part.dtype, torch.float32)) if backward else None
        for step in range(ranks):
            of = (rank - step) % ranks
            works: list[Any] = []
            if step < ranks - 1:
                coming, works = _exchange(part, group)
            if sums is not None and step:  # those of the block before come back together with this block's
                sums, more = _exchange(sums, group)
                works += more
            rows = slice(half, None) if of > rank else everything
            columns = slice(None, half) if of < rank else everything
            grads = yield rows, part[:, :, :, columns], of == rank
            for work in works:
                work.wait()
            if sums is not None:
                for side, grad in zip(sums, grads):
                    side[:, :, columns] += grad
            if step < ranks - 1:
                part = coming
        if sums is None:
            return None
        sums, works = _exchange(sums, group)  # to the rank whose keys and values they are of
        for work in works:
            work.wait()
        return sums

    def held(self, part: int, ranks: int, backward: bool) -> int:
        return (8 if backward else 2) * part


def _exchange(sent: Tensor, group: str) -> tuple[Tensor, list[Any]]:
    """`sent` on its way to the next rank, and where that of the rank before arrives; wait for the works before reading."""
    of_group = find_group(group)
    ranks, rank, got = of_group.size(), of_group.rank(), torch.empty_like(sent)
    to, of = (dist.get_global_rank(of_group, number % ranks) for number in (rank + 1, rank - 1))
    ops = [dist.P2POp(dist.isend, sent, to, of_group), dist.P2POp(dist.irecv, got, of, of_group)]
    return got, dist.batch_isend_irecv(ops)


# ``ulysses``: an all-to-all gives each rank some heads of the whole sequence, and a second one brings the result back.


class Ulysses(ContextMethod):
    """All tokens of some heads inside of attention, all heads of some tokens outside."""

    word = "ulysses"
    cuts_heads = True

    def check(self, stack: CutStack, ranks: int) -> None:
        heads = getattr(getattr(stack.module, "config", None), "num_attention_heads", None)
        if heads is None or heads % ranks:
            raise ValueError(
                f"method='ulysses' gives each of {ranks} ranks some heads, and {type(stack.module).__name__} has "
                f"{heads}: use a divisor of it, or method='all_gather'."
            )
        for name, module in stack.module.named_modules():
            if uses_interface(module) and (parameters := [name for name, _ in module.named_parameters(recurse=False)]):
                raise ValueError(
                    f"method='ulysses' gives each rank some heads, and {name}, {a_or_an(module)}, holds {parameters[0]} for "
                    "all of them (attention sinks): use method='all_gather'."
                )

    def attend(self, call: Attention) -> Any:
        parts, mask = call.parts, call.mask
        heads, keys = call.query.shape[1], call.key.shape[1]
        if (
            heads % parts.ranks
            or keys % parts.ranks
            or (isinstance(mask, Tensor) and not isinstance(call, OfTransformers))
        ):
            raise NotImplementedError(
                f"method='ulysses' requires heads that {parts.ranks} ranks divide, those of keys as well, and no mask that "
                f"a layer of a plain model makes; this attention has {heads} heads, {keys} of keys on each rank of tp. Use "
                "a smaller tp or cp, or method='all_gather'."
            )
        query, key, value = (
            heads_for_sequence(each, parts.ranks, parts.group) for each in (call.query, call.key, call.value)
        )
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] > 1:
            mask = mask[:, parts.rank * query.shape[1] : (parts.rank + 1) * query.shape[1]]
        attended = call.states(call.run(query, key, value, mask, call.causal))
        return call.output(sequence_for_heads(attended, parts.ranks, parts.group))


# By the words of `ContextParallel.method`.
METHODS: dict[str, ContextMethod] = {method.word: method for method in (GatherKeys(), Ring(), Ulysses())}
