"""Names of models that need no file: the published shapes of model families. Loads without torch."""

import os
import re
from pathlib import Path
from typing import Any

from nemo_like._util.words import did_you_mean

# Form of a repository's name on the Hub: its owner, one slash, its name.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def _llama(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int = 128_256, **more: object
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 131_072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": False,
    } | more


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _llama(
        2880,
        2880,
        layers,
        64,
        8,
        vocab=201_088,
        model_type="gpt_oss",
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
    )


PRESETS: dict[str, dict[str, Any]] = {
    # Ours, for trying things: byte-level (256 bytes), small enough for a laptop's CPU.
    "llama-tiny": _llama(128, 384, 4, 4, 2, vocab=256),
    "llama-small": _llama(512, 1536, 8, 8, 4, vocab=256),
    "mixtral-tiny": _llama(
        128, 192, 4, 4, 2, vocab=256, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2
    ),
    # Llama 3 shapes: "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3, and the 3.2 model cards.
    "llama3-1b": _llama(2048, 8192, 16, 32, 8, tie_word_embeddings=True),
    "llama3-3b": _llama(3072, 8192, 28, 24, 8, tie_word_embeddings=True, head_dim=128),
    "llama3-8b": _llama(4096, 14_336, 32, 32, 8),
    "llama3-70b": _llama(8192, 28_672, 80, 64, 8),
    "llama3-405b": _llama(16_384, 53_248, 126, 128, 8),
    # Qwen3 (arXiv 2505.09388), table 1.
    "qwen3-8b": _llama(4096, 12_288, 36, 32, 8, vocab=151_936, model_type="qwen3", head_dim=128),
    # Mixtral 8x7B (arXiv 2401.04088), table 1.
    "mixtral-8x7b": _llama(
        4096, 14_336, 32, 32, 8, vocab=32_000, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2
    ),
    # Qwen3-30B-A3B (arXiv 2505.09388), table 2, and the config.json of its model card.
    "qwen3-30b-a3b": _llama(
        2048,
        6144,
        48,
        32,
        4,
        vocab=151_936,
        model_type="qwen3_moe",
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    ),
    # DeepSeek-V3 (arXiv 2412.19437), section 4.2, and the config.json of its model card; without the extra prediction layer.
    "deepseek-v3": _llama(
        7168,
        18_432,
        61,
        128,
        128,
        vocab=129_280,
        model_type="deepseek_v3",
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    ),
    # gpt-oss-20b and gpt-oss-120b (arXiv 2508.10925), section 2, and the config.json of their model cards.
    "gpt-oss-20b": _gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss(layers=36, experts=128),
}


def check_model_name(spec: str) -> None:
    """Raise ValueError where `spec` names no preset, file, folder or ``module:function``. Nothing is built."""
    path = Path(spec)
    if spec in PRESETS or path.exists() or (":" in spec and os.sep not in spec):
        return
    raise unknown_model(spec)


def unknown_model(spec: str) -> ValueError:
    """Return the error for a name that no model has."""
    path = Path(spec)
    if _HUB_NAME.fullmatch(spec) and path.suffix != ".json" and not path.parent.exists():
        return ValueError(
            f"{spec!r} looks like a Hub name, and nothing is downloaded here. Get its config first: hf download {spec} "
            "config.json --local-dir DIR, then --model DIR."
        )
    return ValueError(
        f"Model {spec!r} is not a preset ({', '.join(PRESETS)}), an existing config.json or its folder, or "
        "'module:function'." + did_you_mean(spec, tuple(PRESETS))
    )
