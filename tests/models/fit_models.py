"""The tiny models that layouts are looked for."""

from torch import nn

from tests.checks import seeded
from tests.models.tiny import made


def llama(layers: int = 3) -> nn.Module:
    """Of width 48, with 512 tokens in its vocabulary and at most 64 in a sequence."""
    return seeded(
        made, "Llama", hidden_size=48, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip


def mixture() -> nn.Module:
    """Two layers of eight experts each, of which a token takes two; 128 tokens in its vocabulary."""
    return made(
        "Qwen3Moe", hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2, vocab_size=128,
        use_cache=False,
    )  # fmt: skip
