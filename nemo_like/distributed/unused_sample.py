"""A sample that runs everything and counts for nothing: for ranks whose batch has no image (or sound).

A tower that trains is sharded like the rest of the model: a rank that skips it leaves the others waiting for its share.
Models refuse an empty image, and an image without its place among the tokens. So a rank without an image takes a blank
one with its tokens behind those of its first row, where a causal model's other tokens don't see it, and with labels that
no loss counts: the tower gets gradients of zero, and all ranks run the same collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_TOKENS = "input_ids"
_FILL = {"labels": -100}


def with_unused_sample(batch: Mapping[str, Any], sample: Mapping[str, Any], *, pad_token_id: int = 0) -> dict[str, Any]:
    """`batch`, with `sample` behind its first row, out of the loss. Neither is changed.

    For causal language models with towers; the loss and all gradients are those of `batch` alone.

    >>> batch = {"input_ids": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([[1, 2], [3, 4]])}
    >>> more = with_unused_sample(batch, {"input_ids": torch.tensor([[9]]), "pixel_values": torch.zeros(1, 3, 8, 8)})
    >>> more["input_ids"].tolist(), more["labels"].tolist(), more["pixel_values"].shape
    ([[1, 2, 9], [3, 4, 0]], [[1, 2, -100], [3, 4, -100]], torch.Size([1, 3, 8, 8]))

    Args:
        batch: what this rank would call the model with: ``input_ids`` (B, T), ``labels`` (B, T), perhaps
            ``attention_mask`` and ``position_ids`` of that shape, and no image. Token types that only the sample has are
            0 for the batch.
        sample: one row made by the model's processor from a blank image: ``input_ids`` (1, S), and what goes with the
            image (``pixel_values``, ``image_grid_thw``, ...). Tensors go to the device of the batch.
        pad_token_id: what fills the other rows.

    Raises:
        ValueError: no ``input_ids`` of these shapes; the batch has an image already; a tensor (B, T, ...) of another
            name, of which nobody knows what to append.
    """
    tokens, extra = batch.get(_TOKENS), sample.get(_TOKENS)
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or not isinstance(extra, Tensor) or extra.shape[:1] != (1,):
        shapes = [tuple(v.shape) if isinstance(v, Tensor) else v for v in (tokens, extra)]
        raise ValueError(
            f"input_ids are {shapes[0]} in the batch and {shapes[1]} in the sample: not (B, T) and (1, S)."
        )
    rows, length, more = *tokens.shape, extra.shape[1]
    known = {_TOKENS, "labels", "attention_mask", "position_ids"}
    media = {name: value for name, value in sample.items() if name not in known and not _per_token(name, value, more)}
    already = [name for name in media if batch.get(name) is not None]
    if already:
        raise ValueError(f"The batch has {', '.join(already)} itself: it needs no unused sample.")
    out: dict[str, Any] = dict(batch)
    for name, value in batch.items():
        if name in known and isinstance(value, Tensor):
            tail = value.new_full(
                (rows, more, *value.shape[2:]), _FILL.get(name, pad_token_id if name == _TOKENS else 0)
            )
            if name != "labels":
                tail[0] = _own(name, extra, more).to(tail)
            out[name] = torch.cat([value, tail], dim=1)
        elif name not in known and _of_shape(value)[:2] == (rows, length):
            given = sample.get(name)
            if not isinstance(given, Tensor):
                raise ValueError(
                    f"The batch has {name}, {tuple(value.shape)}, and the sample has not: nothing to append."
                )
            tail = value.new_zeros((rows, more, *value.shape[2:]))
            tail[0] = given[0].to(tail)
            out[name] = torch.cat([value, tail], dim=1)
    for name, value in sample.items():
        if name.endswith("token_type_ids") and isinstance(value, Tensor) and batch.get(name) is None:
            out[name] = value.new_zeros((rows, length + more), device=tokens.device)  # text, in all models
            out[name][0, length:] = value[0]
    return out | {n: v.to(tokens.device) if isinstance(v, Tensor) else v for n, v in media.items()}


def _own(name: str, extra: Tensor, more: int) -> Tensor:
    """What the sample's own tokens have there; with explicit positions they are a document of their own."""
    if name == _TOKENS:
        return extra[0]
    return torch.ones(more) if name == "attention_mask" else torch.arange(more)


def _per_token(name: str, value: Any, tokens: int) -> bool:
    return name.endswith(("_ids", "_mask")) and _of_shape(value)[:2] == (1, tokens)


def _of_shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()
