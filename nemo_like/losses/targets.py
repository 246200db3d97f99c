"""What labels mean to the losses of PyTorch and transformers."""

from __future__ import annotations

from torch import nn

IGNORED = -100
"""The label that counts for nothing, as `F.cross_entropy` has it."""


def predicts_next_token(model: nn.Module) -> bool:
    """Whether `model` computes transformers' loss of causal models, which shifts ``labels``, unless it is given
    ``shift_labels``. GPT-2 does, too, whose ``loss_type`` is None."""
    return getattr(getattr(model, "loss_function", None), "__name__", None) == "ForCausalLMLoss"
