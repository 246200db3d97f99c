"""What single model types need to be small: settings that no rule for a field's name gives, and inputs besides text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1}
_GEMMA = {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}
_PICTURE = {"image_size": 16, "patch_size": 8}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}


def _mrope(*section: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}}


SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 1},
    "gemma3": {"mm_tokens_per_image": 49, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92},
    "qwen3_vl_vision": {"deepstack_visual_indexes": [0, 1]},
    "bamba": _MAMBA,
    "granitemoehybrid": _MAMBA,
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "chunk_size": 8},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "mamba_dt_rank": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma3n_text": _GEMMA | _TWO_KINDS | {"laurel_rank": 8},
    "gemma4_text": _GEMMA | _TWO_KINDS | {"global_head_dim": 8},
    "gemma4_unified_text": _TWO_KINDS | {"num_kv_shared_layers": 0, "global_head_dim": 8},
    "dots1": {"n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "xmod": {"default_language": "en_XX"},
    "xlm": {"emb_dim": 32, "n_words": 96},
    "flaubert": {"emb_dim": 32, "n_words": 96},
    "qwen2_vl_text": _mrope(2, 1, 1),
    "qwen2_5_vl_text": _mrope(2, 1, 1),
    "qwen2_5_omni_text": _mrope(2, 1, 1),
    "qwen2_5_omni_talker": _mrope(2, 1, 1),
    "glm4v_text": _mrope(2, 1, 1),
    "glm4v_moe_text": _mrope(1, 1, 0),
    "glm46v_text": _mrope(2, 1, 1),
    "glm_image_text": _mrope(2, 1, 1),
    "glm_ocr_text": _mrope(2, 1, 1),
    "zaya": {"num_experts_per_tok": 1},
    "kimi_linear": {"num_experts_per_token": 2, "topk_group": 1, "layer_types": ["linear_attention", "full_attention"]},
    "musicgen_decoder": {"num_codebooks": 1, "decoder_start_token_id": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1, "decoder_start_token_id": 1},
    "blip_vision_model": _PICTURE,
    "blip_text_model": {"encoder_hidden_size": 32},
    "blip_2_vision_model": _PICTURE,
    "instructblip_vision_model": _PICTURE,
    "instructblipvideo_vision_model": _PICTURE,
    "instructblip_qformer": {"encoder_hidden_size": 32},
    "instructblipvideo_qformer": {"encoder_hidden_size": 32},
    "blip_2_qformer": {"encoder_hidden_size": 32},
    "blip-2": {"num_query_tokens": 2, "image_token_index": 95},
    "instructblip": {"num_query_tokens": 2, "image_token_index": 95},
    "instructblipvideo": {"num_query_tokens": 2, "video_token_index": 95},
    "git_vision_model": _PICTURE,
    "kosmos_2_vision_model": _PICTURE,
    "whisper": {"max_source_positions": 8, "num_mel_bins": 8},
    "speech_to_text": {"input_feat_per_channel": 8, "conv_channels": 16},
    "step3p5": {"sliding_window": 8},
    "dots3_note": {"per_layer_config": {}},
    "dots3_note_text": {"per_layer_config": {}},
    "inkling2_vision": {"text_hidden_size": 32},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "emu3": {"vocabulary_map": {"<image>": 3}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], "mlp_layer_types": ["dense", "sparse"]},
}
"""By the configuration's ``model_type``."""


def _pixels(config: Any, text: dict[str, Tensor]) -> dict[str, Tensor | None]:
    size = config.vision_config.image_size
    return {"pixel_values": torch.randn(len(text["input_ids"]), 3, size, size)}


def _queried(config: Any, text: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """A picture, and in the text one place for each query."""
    ids = text["input_ids"].clone()
    ids[:, :2] = 95
    return _pixels(config, text) | {"input_ids": ids}


def _instructed(config: Any, text: dict[str, Tensor]) -> dict[str, Tensor | None]:
    return _queried(config, text) | {"qformer_input_ids": text["input_ids"]}


def _video(config: Any, text: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """A film of one picture."""
    queried = _instructed(config, text)
    pixels = queried["pixel_values"]
    assert pixels is not None
    return queried | {"pixel_values": pixels[:, None]}


def _image_states(config: Any, text: dict[str, Tensor]) -> dict[str, Tensor | None]:
    ids = text["input_ids"]
    mask = torch.zeros_like(ids)
    mask[:, :2] = 1
    return {"image_embeds": torch.randn(len(ids), 2, config.text_config.embed_dim), "image_embeds_position_mask": mask}


def _mel(config: Any, text: dict[str, Tensor]) -> dict[str, Tensor | None]:
    features = torch.randn(len(text["input_ids"]), config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_ids": None, "input_features": features}


def _filter_bank(config: Any, text: dict[str, Tensor]) -> dict[str, Tensor | None]:
    features = torch.randn(len(text["input_ids"]), 16, config.input_feat_per_channel)
    return {"input_ids": None, "input_features": features}


def _wave(config: Any, text: dict[str, Tensor]) -> dict[str, Tensor | None]:
    return {"input_ids": None, "input_values": torch.randn(len(text["input_ids"]), 4000)}


def _patches(config: Any, text: dict[str, Tensor]) -> dict[str, Tensor | None]:
    vision = config.vision_config
    patches = torch.rand(len(text["input_ids"]), 4, 2 + vision.patch_embed_hidden_size)
    return {"input_ids": None, "flattened_patches": patches}


def _boxes(config: Any, text: dict[str, Tensor]) -> dict[str, Tensor | None]:
    return {"bbox": torch.rand(*text["input_ids"].shape, 4).sort(-1).values}


def _states(config: Any, text: dict[str, Tensor]) -> dict[str, Tensor | None]:
    return {"input_ids": None, "inputs_embeds": torch.randn(*text["input_ids"].shape, config.hidden_size)}


def _codes(config: Any, text: dict[str, Tensor]) -> dict[str, Tensor | None]:
    return {"labels": text["labels"][:, :, None]}


INPUTS: dict[str, Callable[[Any, dict[str, Tensor]], dict[str, Tensor | None]]] = {
    "BlipForConditionalGeneration": _pixels,
    "Blip2ForConditionalGeneration": _queried,
    "GitForCausalLM": _pixels,
    "InstructBlipForConditionalGeneration": _instructed,
    "InstructBlipVideoForConditionalGeneration": _video,
    "Kosmos2ForConditionalGeneration": _image_states,
    "WhisperForConditionalGeneration": _mel,
    "Speech2TextForConditionalGeneration": _filter_bank,
    "MoonshineForConditionalGeneration": _wave,
    "Pix2StructForConditionalGeneration": _patches,
    "UdopForConditionalGeneration": _boxes,
    "SeamlessM4TTextToUnitForConditionalGeneration": _states,
    "MusicgenForCausalLM": _codes,
    "MusicgenMelodyForCausalLM": _codes,
}
"""By class: what it is called with besides text, or instead of it (None: not with that), from its configuration."""
