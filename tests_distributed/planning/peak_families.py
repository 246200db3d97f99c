"""Tiny models of transformers' families that neither the planner nor its tests name: what its peaks are checked on."""

from typing import Any

import torch
from torch import Tensor, nn

VOCAB, SEQ, EXPERTS = 384, 96, 4

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_NO_DROPOUT = {
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "hidden_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0,
    "residual_dropout": 0.0, "embedding_dropout": 0.0,
}  # fmt: skip
_WINDOW = {"sliding_window": 32}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo3": ("Olmo3", _WINDOW),
    "cohere2": ("Cohere2", _WINDOW),
    "starcoder2": ("Starcoder2", _WINDOW),
    "glm4": ("Glm4", {}),
    "phi": ("Phi", {}),
    "smollm3": ("SmolLM3", {}),
    "ernie4_5": ("Ernie4_5", {}),
    "exaone4": ("Exaone4", _WINDOW),
    "seed_oss": ("SeedOss", {}),
    "helium": ("Helium", {}),
    "apertus": ("Apertus", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {}),
    "nemotron": ("Nemotron", {}),
    "arcee": ("Arcee", {}),
    "persimmon": ("Persimmon", {}),
    "biogpt": ("BioGpt", {}),
}
WITH_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoe": ("GraniteMoe", {"num_local_experts": EXPERTS}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": 48}),
    "minimax": ("MiniMax", {"num_local_experts": EXPERTS, "layer_types": ["full_attention"] * 4}),
    "flex_olmo": ("FlexOlmo", {"num_experts": EXPERTS}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": EXPERTS, "moe_topk": 2}),
    "deepseek_v2": (
        "DeepseekV2",
        {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 48, "num_key_value_heads": 4,
         "head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1, **_LATENT},
    ),
    "afmoe": ("Afmoe", {"num_experts": EXPERTS, "moe_intermediate_size": 48, "num_dense_layers": 1, **_WINDOW}),
    "solar_open": ("SolarOpen", {"n_routed_experts": EXPERTS, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": EXPERTS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}),
}  # fmt: skip
FAMILIES = DENSE | WITH_EXPERTS
WELL_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "gpt_oss": ("GptOss", {"num_local_experts": EXPERTS, **_WINDOW}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": 48, "decoder_sparse_step": 1}),
    "deepseek_v3": (
        "DeepseekV3",
        {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 48, "num_key_value_heads": 4,
         "head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1, **_LATENT},
    ),
}  # fmt: skip
"""Those that the planner was written with."""
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "biogpt, dropout": ("BioGpt", {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}),
}


def build(name: str) -> nn.Module:
    """The family's causal language model, tiny; all its tokens go to the same two experts, which one of two ranks holds."""
    import transformers

    prefix, own = (FAMILIES | WELL_KNOWN | OTHERS)[name]
    config_class = getattr(transformers, f"{prefix}Config")
    known = config_class().to_dict()
    asked = _SHAPE | _NO_DROPOUT | {"num_experts_per_tok": 2} | own
    config = config_class(**{key: value for key, value in asked.items() if key in known or key in own})
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if (parameter.dim() == 2 and len(parameter) == EXPERTS) or parameter_name.endswith("router.bias"):
                parameter.zero_()
    return model.train()


def tokens(rows: int) -> Tensor:
    return torch.randint(3, VOCAB, (rows, SEQ), generator=torch.Generator().manual_seed(1))
