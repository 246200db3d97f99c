"""Attention of a part's queries over the keys of the whole sequence, in the place of two functions.

Models of transformers look their attention up by a name in their config. The names registered here mean "gather, then
the model's own function": so scales, soft caps, sinks and dropout stay those of the model, and only keys, values and
the mask are others. In plain models, torch's `scaled_dot_product_attention` is replaced while forward runs, and
recomputation in backward sees it again, because the engine puts back the functions that forward saw.

Masks come first: of a part's queries (rows) over the keys of the whole sequence (columns).
"""

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like._util.code import names_in
from nemo_like.distributed.context.parts import (
    CURRENT,
    Attention,
    BlocksOfMask,
    Parts,
    StackCall,
    in_blocks,
    kept_apart,
    once_for_all_layers,
    parts_of,
)
from nemo_like.torch_compat import is_fake
from nemo_like.transformers_compat import (
    ATTENTION,
    ATTENTION_LOOKUP,
    attention_functions,
    attention_interface,
    causal_mask_function,
    mask_functions,
    mask_interface,
)

# Masks, from global positions; columns are in order.


def causal_mask(parts: Parts, columns: int, query: Tensor) -> Tensor:
    """The causal mask of this rank's queries (B, H, L, D) over `columns` keys, (1, 1, L, columns), for eager attention."""
    rows = parts.positions(columns, query.device)
    return additive_mask((torch.arange(columns, device=query.device) <= rows[:, None])[None, None], query.dtype)


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `mask` is True, else the least number of `dtype`, which eager attention adds to its scores."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def make_mask(
    implementation: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    **kwargs: object,
) -> Any:
    """Make a mask for transformers, which calls this as registered for `implementation`.

    Outside of a cut stack the mask is that of the whole sequence: the stack cuts it when it gets it.
    """
    call = CURRENT.get()
    if call is None or call.parts.idle:
        return mask_functions()[implementation](
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            dtype=dtype,
            **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )
    masked, method = call.masked or call.documents is not None, call.parts.method
    plain = mask_function is causal_mask_function()
    if plain and implementation == "sdpa" and not masked and kwargs.get("allow_is_causal_skip", True):
        return None  # padding is at the end, where no query of a token looks
    whole = q_length * call.parts.ranks
    looks = _looks(call, whole, kv_length, mask_function, attention_mask)
    if implementation == "sdpa" and in_blocks.get():
        return BlocksOfMask()
    if implementation == "flex_attention":
        length = whole if method.cuts_heads else q_length
        place = _rows_of_whole(call.parts, length)
        return build_block_mask(lambda b, h, q, k: looks(b, h, place(q), k), (batch_size, 1, length, kv_length), device)
    rows = torch.arange(whole, device=device) if method.cuts_heads else call.parts.positions(whole, device)
    b, q = torch.arange(batch_size, device=device)[:, None, None, None], rows[None, None, :, None]
    k = torch.arange(kv_length, device=device)[None, None, None, :]
    mask = torch.as_tensor(looks(b, torch.zeros_like(b), q, k), device=device)
    mask = mask.expand(batch_size, 1, len(rows), kv_length)  # True where a query may look
    return additive_mask(mask, dtype) if implementation == "eager" else once_for_all_layers(mask, dtype)


def _looks(
    call: StackCall, whole: int, columns: int, mask_function: Callable[..., Any], attention_mask: Tensor | None
) -> Callable[..., Any]:
    """Return a function of (batch, head, query, key), in positions of the whole sequence: whether that query may look
    at that key.

    whole: rows of the whole sequence, columns: its keys, both with padding.
    """
    # Where the caller gave none, it only hides the padding at the end, which is the same in every row of the batch.
    each_row = call.masked or columns != whole
    real = None if attention_mask is None else attention_mask[:, :columns].to(torch.bool)
    numbered = call.documents is not None and call.documents.shape[-1] == columns
    documents = call.documents if numbered else None
    if documents is not None:
        kept_apart()

    def looks(b: Any, h: object, q: Any, k: Any) -> Any:
        mask = mask_function(b, h, q, k)
        if real is not None:
            mask = mask & (real[b, k] if each_row else real[0, k])
        if documents is not None:
            mask = mask & (documents[b, q] == documents[b, k])
        if call.padded:
            mask = mask | ((q == k) & (k >= call.length))  # padding looks at itself: an empty row would be NaN
        return mask

    return looks


# Block masks of flex attention: of a part's queries (rows) over the keys of the whole sequence (columns).

Mod = Callable[..., Any]  # A ``mask_mod(b, h, q, kv)``.

# Rows of a block in torch; pairs of positions that a function is called with at a time, one byte each.
_BLOCK, _AT_ONCE = 128, 2**28


def build_block_mask(mask_mod: Mod, shape: tuple[int, int, int, int], device: object) -> Any:
    """The block mask (B, H, rows, columns) of `mask_mod`: as ``create_block_mask``, some rows at a time.

    At 128k tokens all pairs of positions at once would be gigabytes.
    """
    flex: Any = sys.modules["torch.nn.attention.flex_attention"]  # models that use it have imported it
    batch, heads, rows, columns = shape
    step = max(1, _AT_ONCE // (batch * heads * columns * _BLOCK)) * _BLOCK
    pieces = [
        flex.create_block_mask(
            _from_row(mask_mod, start), batch, heads, min(step, rows - start), columns, device=device
        )
        for start in range(0, rows, step)
    ]
    if len(pieces) == 1:
        return pieces[0]
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    joined = {name: torch.cat([getattr(piece, name) for piece in pieces], 2) for name in names}
    return flex.BlockMask.from_kv_blocks(**joined, mask_mod=mask_mod, seq_lengths=(rows, columns))


def _from_row(mask_mod: Mod, start: int) -> Mod:
    return mask_mod if start == 0 else lambda b, h, q, kv: mask_mod(b, h, q + start, kv)


def _rows_of_whole(parts: Parts, rows: int) -> Callable[[Tensor], Tensor]:
    """Return a function of this rank's `rows` that gives those of the whole sequence. Sums alone, which a kernel computes
    in place."""
    if parts.method.cuts_heads:
        return lambda q: q
    chunk = rows // 2
    head, tail = parts.rank * chunk, (2 * parts.ranks - 2 - parts.rank) * chunk
    return lambda q: torch.where(q < chunk, q + head, q + tail)


# ---------------------------------------------------------------------------------------------- transformers' interface

_PREFIX = "nemo_like_parts|"


def register(implementation: str) -> str:
    """Make `implementation` ("sdpa", "eager", ...) over cut sequences known to transformers; its name there."""
    name = _PREFIX + implementation
    attention_interface().register(name, functools.partial(_attend, implementation, attention_functions()))
    mask_interface().register(name, functools.partial(make_mask, implementation))
    return name


def unregistered(name: str) -> str:
    """The implementation that a registered name means; any other name as it is."""
    return name.removeprefix(_PREFIX)


def attention_of(config: object) -> str | None:
    """The implementation that a config names, also where stages of a pipeline share it and one was cut before."""
    name = getattr(config, ATTENTION, None)
    return name if name is None else unregistered(name)


def uses_interface(module: nn.Module) -> bool:
    """Return whether the forward of `module` looks its attention up in transformers' interface."""
    return ATTENTION_LOOKUP in names_in(type(module).forward)


@dataclass
class OfTransformers(Attention):
    """A call through the interface, of `module`; an output is (B, L, H, D), and weights."""

    implementation: str
    module: nn.Module

    @property
    def fused(self) -> bool:  # type: ignore[override]
        return self.implementation == "sdpa"

    def run(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool = False) -> Any:
        if isinstance(mask, BlocksOfMask):
            mask = None
        if isinstance(mask, Tensor) and mask.ndim == 2:  # with one query, transformers tests a mask's heads
            mask = mask[None, None]
        return self.function(self.module, query, key, value, mask, **self.arguments | {"is_causal": causal})

    def states(self, output: Any) -> Tensor:
        return output[0].transpose(1, 2)

    def output(self, states: Tensor) -> Any:
        return states.transpose(1, 2).contiguous(), None


def _attend(
    implementation: str,
    functions: Mapping[str, Callable[..., Any]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> Any:
    """`implementation`'s attention: (B, H, L, D) queries and (B, KV heads, L, D) keys and values to (B, L, H, D).

    functions: transformers' by name, looked up before a layer is compiled: Dynamo cannot trace an import.
    """
    if implementation == "eager":
        function = sys.modules[type(module).__module__].eager_attention_forward
    else:
        function = functions[implementation]
    parts = parts_of(module)
    if parts is None:
        return function(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError(
            f"cp cuts the sequence, and {type(module).__name__} brings a position bias for the keys of one rank. Use cp=1."
        )
    causal = kwargs.get("is_causal")
    causal = attention_mask is None and bool(getattr(module, "is_causal", True) if causal is None else causal)
    return parts.method.attend(
        OfTransformers(parts, function, query, key, value, attention_mask, causal, kwargs, implementation, module)
    )


# ---------------------------------------------------------------------------------- torch's function, in plain models

_SDPA = F.scaled_dot_product_attention
_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class OfTorch(Attention):
    """A call of `scaled_dot_product_attention`."""

    def run(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool = False) -> Any:
        call = CURRENT.get()
        if mask is None and not causal and call is not None and call.padded:  # (1, S), True for the keys of tokens
            mask = torch.arange(key.shape[-2], device=key.device)[None] < call.length
        elif mask is not None and mask.shape[-1] != key.shape[-2]:
            raise NotImplementedError(
                f"cp cuts the sequence, and a layer brings an attention mask {tuple(mask.shape)} of its own for "
                f"{key.shape[-2]} keys. Pass the mask to the model for the whole sequence, use is_causal=True, or cp=1."
            )
        return self.function(query, key, value, attn_mask=mask, is_causal=causal, **self.arguments)


class AttentionHooks:
    """`scaled_dot_product_attention` is another function while the model runs; recomputation gets the one of its forward."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._before: list[Any] = []

    def before(self, module: nn.Module, args: object) -> None:
        """The forward pre-hook."""
        self._before.append(F.scaled_dot_product_attention)
        if not self._parts.idle:
            # In torch's module, for all threads. A function mode would be this thread's alone, and Dynamo (torch 2.13)
            # leaves it out of compiled layers with ac="selective", so that their gradients are wrong without a word; with
            # ac="full" it breaks their graphs.
            F.scaled_dot_product_attention = self._attend

    def after(self, module: nn.Module, args: object, output: object) -> None:
        """The forward hook, also after an exception."""
        if self._before:
            F.scaled_dot_product_attention = self._before.pop()

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(_SDPA_NAMES, args)) | kwargs
        query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
        if query.shape[-2] != key.shape[-2]:
            raise NotImplementedError(
                f"cp cuts the sequence, and attention got {query.shape[-2]} queries and {key.shape[-2]} keys: whether these "
                "keys are cut is not known here. Use cp=1 for this model."
            )
        mask, causal = arguments.pop("attn_mask", None), arguments.pop("is_causal", False)
        call = OfTorch(self._parts, _SDPA, query, key, value, mask, causal and mask is None, arguments)
        return self._parts.method.attend(call)


def with_own_positions(parts: Parts, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A forward pre-hook of an `nn.Embedding`: ``arange(T)``, with which models look positions up, becomes this rank's."""
    if CURRENT.get() is None or not args or not isinstance(args[0], Tensor) or not _is_range(args[0]):
        return None
    index: Tensor = args[0]
    return (parts.positions(index.numel() * parts.ranks, index.device).view_as(index).to(index.dtype), *args[1:])


def _is_range(index: Tensor) -> bool:
    """Return whether `index`, (T,) or (1, ..., T), counts from zero; of a fake tensor that is not known."""
    length = index.shape[-1] if index.ndim else 0
    if index.numel() != length or is_fake(index):
        return False
    return torch.equal(index.reshape(-1), torch.arange(length, device=index.device, dtype=index.dtype))
