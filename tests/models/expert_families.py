"""Tiny models of the families with experts: `build(name)`, the same weights every time.

4 experts; 2 of them for each token (Llama 4: 1).
"""

from typing import Any

import torch
from torch import Tensor, nn

VOCAB, EXPERTS = 64, 4
NAMES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "llama4", "glm4_moe")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "use_cache": False, "num_experts_per_tok": 2,
}  # fmt: skip
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_GROUPS = {"n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_NARROW = {"moe_intermediate_size": 16}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": EXPERTS, "decoder_sparse_step": 1, **_NARROW}),
    "deepseek_v3": ("DeepseekV3", {"num_key_value_heads": 4, **_GROUPS, **_NARROW, **_LATENT}),
    "gpt_oss": ("GptOss", {"num_local_experts": EXPERTS, "sliding_window": 8}),
    "olmoe": ("Olmoe", {"num_experts": EXPERTS}),
    "llama4": ("Llama4", {"num_local_experts": EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}),
    "glm4_moe": ("Glm4Moe", {**_GROUPS, **_NARROW}),
}


def build(name: str, device: str = "cpu", **changes: Any) -> nn.Module:
    """A causal language model of the family, in training mode. Weights are drawn wide, so that routing differs by token."""
    import transformers

    prefix, values = _CONFIGS[name]
    config_class = f"{prefix}TextConfig" if name == "llama4" else f"{prefix}Config"
    values = {**_COMMON, **values, **changes}
    if name == "olmoe":
        values.pop("head_dim")
    config = getattr(transformers, config_class)(**values)
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = getattr(transformers, f"{prefix}ForCausalLM")(config)
    if device != "meta":
        with torch.no_grad():
            for parameter_name, parameter in sorted(model.named_parameters()):
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.2)
                elif "bias" in parameter_name or "sink" in parameter_name:
                    parameter.normal_(0, 0.1)
    return model.train()


def tokens(rows: int = 4, length: int = 12, seed: int = 1) -> Tensor:
    """(rows, length) token numbers."""
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
