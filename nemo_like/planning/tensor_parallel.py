"""What one rank of a tensor-parallel model computes: the same model with its heads and its FFN divided."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")


def local_twin(model: nn.Module, tp: int) -> nn.Module:
    """A twin of a Hugging Face decoder on the meta device, with the parameters that one of `tp` ranks holds.

    Attention heads and FFN width are divided, which is what the column- and row-wise styles of a tensor-parallel plan
    do; norms, embedding and head stay whole, and so do the logits, which such plans gather. Sequence parallelism is
    not modelled.

    Raises:
        ValueError: the model has no config that says these sizes, or one of them is not a multiple of `tp`.
    """
    if tp == 1:
        return model
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ValueError(
            f"tp={tp}: {type(model).__name__} has no transformers config to read heads and widths from, so the share "
            "of one rank is unknown. Plan it with tp=1 and the model of one rank."
        )
    local = copy.deepcopy(config)
    text: Any = local.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if heads and not getattr(text, "head_dim", None):
        text.head_dim = text.hidden_size // heads
    for name in _DIVIDED:
        value = getattr(text, name, None)
        if value is None:
            continue
        if value % tp:
            raise ValueError(f"tp={tp} does not divide {name}={value} of {type(model).__name__}; use a divisor of it.")
        setattr(text, name, value // tp)
    with torch.device("meta"):
        twin = type(model)(local)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return (twin if dtype is None else twin.to(dtype)).train(model.training)
