"""Relative position biases that attention modules make from lengths (T5 and its kin): of this rank's rows, over all keys."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.distributed.context_parallel.parts import Parts
from nemo_like.transformers_compat import BUCKET


def over_whole_sequences(module: nn.Module, parts: Parts) -> Iterator[Any]:
    """If `module` has T5's ``compute_bias``, exchange it; yields what undoes that."""
    if not hasattr(module, "compute_bias") or not hasattr(module, BUCKET):
        return
    own = module.compute_bias

    def compute_bias(query_length: int, key_length: int, device: Any = None, **kwargs: Any) -> Tensor:
        if parts.idle:
            return own(query_length, key_length, device=device, **kwargs)  # type: ignore[operator]
        table: Any = module.relative_attention_bias
        device = table.weight.device if device is None else device
        rows = parts.positions(query_length * parts.ranks, device)
        if parts.method.cuts_heads:
            rows = torch.arange(query_length * parts.ranks, device=device)
        columns = torch.arange(key_length * parts.ranks, device=device)
        bucket: Any = getattr(module, BUCKET)
        settings = {
            "bidirectional": not module.is_decoder,
            "num_buckets": module.relative_attention_num_buckets,
            "max_distance": module.relative_attention_max_distance,
        }
        asked = inspect.signature(bucket).parameters  # UMT5 reads them of itself
        found = bucket(columns[None] - rows[:, None], **{name: settings[name] for name in asked if name in settings})
        return table(found).permute(2, 0, 1)[None]

    module.compute_bias = compute_bias  # type: ignore[assignment]
    yield lambda: delattr(module, "compute_bias")
