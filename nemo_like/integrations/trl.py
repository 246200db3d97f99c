"""What TRL's trainers do to a model before it is checkpointed."""

from __future__ import annotations

import inspect

from torch import nn


def takes_log_probs_in_chunks(model: nn.Module) -> bool:
    """Whether TRL has given `model`, or the model inside PEFT's, a forward that never makes the logits of all tokens.

    Its trainers ask for that by ``fused_lm_head=True``; such a forward multiplies by the head's weight itself.
    """
    get_base = getattr(model, "get_base_model", None)
    inner = get_base() if callable(get_base) else model
    # The forward that it stands for is another signature, which `inspect` would look at first.
    return "fused_lm_head" in inspect.signature(inner.forward, follow_wrapped=False).parameters
