"""Every model of the installed transformers, made small: the surveys of `python -m tests.tools.surveys` run them."""

from __future__ import annotations

import copy
import signal
from typing import Any

import torch
from torch import nn

from nemo_like._util.extras import require
from tests.tools.surveys.tiny_rules import SETTINGS

# What makes a configuration small. By the field's name, wherever in the tree of configurations it stands.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "hidden_dim", "dim", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("attention_hidden_size", "lru_width", "embedding_size", "projection_dim", "out_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "depth", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "mamba_d_head"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "n_group", "topk_group"), 2),
    "vocab_size": 96,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

ATTEMPTS: tuple[tuple[str, ...], ...] = (
    (),
    ("head_dim",),
    ("head_dim", "num_key_value_heads"),
    ("hidden_size", "head_dim"),
)
"""What is left at its default size in each attempt: configurations check what must divide what."""


def build_tiny(name: str, without: tuple[str, ...] = ()) -> nn.Module:
    """transformers' class `name` with random weights, in training mode, without dropout and layer drop.

    Args:
        name: of a class with a ``config_class``.
        without: fields of the configuration that keep their default, see `ATTEMPTS`.

    Raises:
        ValueError: more than 30 M parameters are left; or what the class itself raises.
    """
    transformers = require("transformers", "hf", "to build its models")
    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, name)
    initialization = require("transformers.initialization", "hf", "to build its models")
    config = cls.config_class(**_small(cls.config_class, without))
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = _SIZES[
            "decoder_start_token_id"
        ]  # generation configs have it since some release
    with torch.device("meta"), initialization.no_init_weights():
        size = sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
    if size > 30_000_000:
        raise ValueError("its default sizes are not made small by the names that are known")
    torch.manual_seed(0)
    model = cls(config).float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _small(config_class: Any, without: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of `config_class`; what `without` names stays as it is."""
    known = config_class().to_dict()
    values = {
        key: value
        for key, value in _SIZES.items()
        if key in known and key not in without and isinstance(known[key], int | None)
    }
    if "kv_lora_rank" in known:
        values["num_key_value_heads"] = _SIZES["num_attention_heads"]  # latent attention shares no heads
    for key, value in known.items():
        if ("dropout" in key or key.endswith("layerdrop")) and isinstance(value, float):
            values[key] = 0.0
    settings = SETTINGS.get(getattr(config_class, "model_type", ""), {})
    values |= {key: value for key, value in settings.items() if key not in without}
    for key, sub in (getattr(config_class, "sub_configs", None) or {}).items():
        model_type = (known.get(key) or {}).get("model_type") if isinstance(known.get(key), dict) else None
        if not hasattr(sub, "for_model") and hasattr(sub, "model_type"):
            values[key] = _small(sub, without)
        elif model_type:
            auto = require("transformers", "hf", "to build its models").AutoConfig
            values[key] = {"model_type": model_type} | _small(type(auto.for_model(model_type)), without)
    return values


class within:
    """Raise TimeoutError after so many seconds of this process's CPU time (main thread, POSIX)."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self._handler = signal.signal(signal.SIGPROF, self._ring)
        self._timer = signal.setitimer(signal.ITIMER_PROF, self.seconds)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, *self._timer)  # somebody else's (a test runner's), if there was one
        signal.signal(signal.SIGPROF, self._handler)

    def _ring(self, *_: object) -> None:
        raise TimeoutError(f"not built and run within {self.seconds} s of CPU time")


def one_line(error: BaseException) -> str:
    """An error's type and the start of its message, for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def cell(text: str) -> str:
    """`text` for a cell of a Markdown table."""
    return text.replace("|", "/").replace("<", "&lt;")
