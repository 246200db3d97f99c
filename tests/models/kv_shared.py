"""Decoders whose last layers read the keys and values of earlier ones."""

import torch
from torch import nn

from tests.models.decoders import VOCAB

_COMMON = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_kv_shared_layers=2, sliding_window=8,
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
)  # fmt: skip


def build(name: str) -> nn.Module:
    """``"gemma3n"`` or ``"gemma4"``, 4 layers of which 2 share, in training mode."""
    import transformers as hf

    torch.manual_seed(0)
    if name == "gemma3n":
        config = hf.Gemma3nTextConfig(
            **_COMMON, hidden_size_per_layer_input=4, vocab_size_per_layer_input=VOCAB, laurel_rank=4,
            activation_sparsity_pattern=[0.0] * 4, altup_num_inputs=2, altup_active_idx=0,
        )  # fmt: skip
        return hf.Gemma3nForCausalLM(config).train()
    config = hf.Gemma4TextConfig(**_COMMON, hidden_size_per_layer_input=4, vocab_size_per_layer_input=VOCAB)
    return hf.Gemma4ForCausalLM(config).train()
