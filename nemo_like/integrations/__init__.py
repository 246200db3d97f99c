"""Other people's training loops: `transformers.Trainer` and TRL.

`nemo_like.integrations.transformers` needs the extra ``hf`` and is imported on its own.
"""

from nemo_like.integrations.activation_offloading import (
    ActivationOffloadingMixin,
    NoOpManager,
    OffloadActivations,
    get_lora_act_offloading_ctx_manager,
)

__all__ = [
    "ActivationOffloadingMixin",
    "NoOpManager",
    "OffloadActivations",
    "get_lora_act_offloading_ctx_manager",
]
