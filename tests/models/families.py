"""Tiny models of many families, for whatever must hold for every kind of model.

`FAMILIES[name]` has `build()` (random weights from a fixed seed, float32, training mode), `step(model)` (one forward on a
fixed batch; a scalar loss) and `layers` (how many layers of each group must be found). Nothing is downloaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like.activation_checkpointing.kv_sharing import disable_cache
from tests.models.blocks import in_turn

VOCAB, DIM, SIDE, PATCH = 64, 32, 16, 4
IMAGE_TOKEN, VIDEO_TOKEN, AUDIO_TOKEN, START, END = 50, 51, 52, 53, 54
PATCHES = (SIDE // PATCH) ** 2


@dataclass(frozen=True)
class Family:
    """One kind of model."""

    kind: str
    """decoder | moe | state-space | encoder-decoder | encoder | vision | audio | multimodal | diffusion | plain"""
    make: Callable[[], nn.Module]
    inputs: Callable[[], Mapping[str, Any]]
    layers: Mapping[str, int] = field(default_factory=lambda: {"language": 2})

    def build(self, seed: int = 0) -> nn.Module:
        """The model in training mode, its weights drawn from `seed`."""
        torch.manual_seed(seed)
        model = self.make().float().train()
        # A checkpointed model is called without a cache, which picks other kernels in some models: the bare one too.
        disable_cache(model)
        return model

    def step(self, model: nn.Module, seed: int = 1) -> Tensor:
        """The loss of one forward pass; random numbers (dropout) start from `seed`."""
        torch.manual_seed(seed)
        return loss_of(model(**self.inputs()))


def loss_of(output: Any) -> Tensor:
    """The model's own loss, or else the mean square of every floating-point tensor in its output."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss.mean()
    tensors = [output] if isinstance(output, Tensor) else [v for v in output.values() if isinstance(v, Tensor)]
    return torch.stack([t.float().square().mean() for t in tensors if t.is_floating_point()]).sum()


# ------------------------------------------------------------------------------------------------------------- batches


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def text(length: int = 12, **more: Any) -> dict[str, Any]:
    ids = torch.randint(1, 48, (2, length), generator=rng())
    return {"input_ids": ids, "labels": ids, **more}


def encoded(length: int = 12) -> dict[str, Any]:
    return {"input_ids": torch.randint(1, 48, (2, length), generator=rng())}


def pixels(side: int = SIDE) -> Tensor:
    return torch.randn(2, 3, side, side, generator=rng())


def image() -> dict[str, Any]:
    return {"pixel_values": pixels()}


def with_image(
    tokens: int = PATCHES, token: int = IMAGE_TOKEN, values: Tensor | None = None, **more: Any
) -> dict[str, Any]:
    """Two sequences, each with one image in front of text."""
    batch = text()
    ids = torch.cat([torch.full((2, tokens), token), batch["input_ids"]], 1)
    return {"input_ids": ids, "labels": ids, "pixel_values": pixels() if values is None else values, **more}


def qwen_image() -> dict[str, Any]:
    """Flattened patches, (images * patches, channels * temporal * patch ** 2), and the grid of each image."""
    flat = torch.randn(2 * PATCHES, 3 * 2 * PATCH * PATCH, generator=rng())
    grid = torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]] * 2)
    batch = with_image(tokens=PATCHES // 4 + 2, values=flat, image_grid_thw=grid)
    batch["input_ids"][:, 0], batch["input_ids"][:, PATCHES // 4 + 1] = START, END
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).int()
    return batch


# -------------------------------------------------------------------------------------------------- plain PyTorch models


class Sequence(nn.Module):
    """Blocks, named by the caller, between an embedding and a head: ids (B, T) to logits (B, T, V)."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(VOCAB, DIM), blocks, nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        if isinstance(self.body, nn.ModuleList | nn.ModuleDict):
            blocks = self.body.values() if isinstance(self.body, nn.ModuleDict) else self.body
            return self.head(in_turn(blocks, self.embed(input_ids)))
        return self.head(self.body(self.embed(input_ids)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """timm's block: pre-norm attention and MLP. (B, T, D) to (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TimmStyle(nn.Module):
    """timm's ``VisionTransformer`` by structure: ``blocks`` is an `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.blocks, self.norm, self.head = nn.Sequential(Block(), Block()), nn.LayerNorm(DIM), nn.Linear(DIM, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patch_embed(pixel_values).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class DoubleBlock(nn.Module):
    """Diffusers' dual-stream block: image (B, I, D) and text (B, T, D) attend together and have their own MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_context, self.attn = nn.LayerNorm(DIM), nn.LayerNorm(DIM), Attention()
        self.ff, self.ff_context = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.modulation = nn.Linear(DIM, 2 * DIM)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale = self.modulation(temb)[:, None].chunk(2, -1)
        both = torch.cat([self.norm_context(encoder_hidden_states), self.norm(hidden_states) * (1 + scale) + shift], 1)
        context, image = self.attn(both).split([encoder_hidden_states.shape[1], hidden_states.shape[1]], 1)
        hidden_states, context = hidden_states + image, encoder_hidden_states + context
        return context + self.ff_context(F.gelu(context)), hidden_states + self.ff(F.gelu(hidden_states))


class SingleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.proj_mlp = nn.LayerNorm(DIM), Attention(), nn.Linear(DIM, DIM)

    def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        x = self.norm(hidden_states) + temb[:, None]
        return hidden_states + self.attn(x) + F.gelu(self.proj_mlp(x))


class DiffusionTransformer(nn.Module):
    """As diffusers' Flux: ``transformer_blocks``, then ``single_transformer_blocks`` on both streams together."""

    _no_split_modules = ("DoubleBlock", "SingleBlock")

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder, self.context_embedder, self.time_embed = (nn.Linear(width, DIM) for width in (8, 16, 1))
        self.transformer_blocks = nn.ModuleList(DoubleBlock() for _ in range(2))
        self.single_transformer_blocks = nn.ModuleList(SingleBlock() for _ in range(3))
        self.proj_out = nn.Linear(DIM, 8)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, timestep: Tensor) -> Tensor:
        x, context = self.x_embedder(hidden_states), self.context_embedder(encoder_hidden_states)
        temb = self.time_embed(timestep[:, None])
        for block in self.transformer_blocks:
            context, x = block(hidden_states=x, encoder_hidden_states=context, temb=temb)
        joined = in_turn(self.single_transformer_blocks, torch.cat([context, x], 1), temb)
        return self.proj_out(joined[:, context.shape[1] :])


def latents() -> dict[str, Any]:
    shapes = {"hidden_states": (2, 6, 8), "encoder_hidden_states": (2, 4, 16), "timestep": (2,)}
    generator = rng()
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


# ---------------------------------------------------------------------------------------------------------- Hugging Face

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADED = COMMON | {"head_dim": 8}
ENCODER = {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}
VISION: dict[str, Any] = {
    "hidden_size": DIM,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def hf(model_class: str, config_class: str, **values: Any) -> Callable[[], nn.Module]:
    """A builder for ``transformers.<model_class>`` from ``transformers.<config_class>(**values)``."""

    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model_class)(getattr(transformers, config_class)(**values))

    return make


def causal(prefix: str, config: str | None = None, **values: Any) -> Callable[[], nn.Module]:
    return hf(f"{prefix}ForCausalLM", config or f"{prefix}Config", **values)


def llava(prefix: str, **values: Any) -> Callable[[], nn.Module]:
    """A vision-language model of LLaVA's make: a vision tower, a projector, a language model."""
    return hf(f"{prefix}ForConditionalGeneration", f"{prefix}Config", image_token_id=IMAGE_TOKEN, **values)


LLAMA_TEXT = {"model_type": "llama"} | HEADED
SIGLIP = {"model_type": "siglip_vision_model"} | VISION
BOTH = {"vision": 2, "language": 2}

FAMILIES: dict[str, Family] = {
    # decoders
    "llama": Family("decoder", causal("Llama", **HEADED), text),
    "qwen3": Family("decoder", causal("Qwen3", **HEADED, tie_word_embeddings=True), text),
    "gemma3_text": Family(
        "decoder",
        causal(
            "Gemma3",
            "Gemma3TextConfig",
            **HEADED,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
        text,
    ),
    "phi3": Family("decoder", causal("Phi3", **COMMON), text),
    "olmo2": Family("decoder", causal("Olmo2", **COMMON), text),
    "gpt2": Family(
        "decoder",
        hf("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_embd=DIM, n_layer=2, n_head=4, n_positions=64),
        text,
    ),
    "gpt_neox": Family("decoder", causal("GPTNeoX", **ENCODER), text),
    "opt": Family(
        "decoder",
        causal("OPT", **ENCODER, ffn_dim=48, word_embed_proj_dim=DIM),
        text,
    ),
    "bloom": Family(
        "decoder",
        causal("Bloom", vocab_size=VOCAB, hidden_size=DIM, n_layer=2, n_head=4),
        text,
    ),
    # mixture of experts
    "mixtral": Family("moe", causal("Mixtral", **HEADED, num_local_experts=4), text),
    "qwen3_moe": Family("moe", causal("Qwen3Moe", **HEADED, **EXPERTS, decoder_sparse_step=1), text),
    "olmoe": Family("moe", causal("Olmoe", **COMMON, num_experts=4, num_experts_per_tok=2), text),
    "gpt_oss": Family(
        "moe",
        causal("GptOss", **HEADED, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
        text,
    ),
    "deepseek_v3": Family(
        "moe",
        causal(
            "DeepseekV3",
            **COMMON | {"num_key_value_heads": 4},
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
        text,
    ),
    # state-space and hybrid
    "mamba": Family(
        "state-space",
        causal("Mamba", vocab_size=VOCAB, hidden_size=DIM, num_hidden_layers=2, state_size=4),
        text,
    ),
    "mamba2": Family(
        "state-space",
        causal(
            "Mamba2",
            vocab_size=VOCAB,
            hidden_size=DIM,
            num_hidden_layers=2,
            state_size=8,
            num_heads=8,
            head_dim=8,
            n_groups=2,
            chunk_size=8,
        ),
        text,
    ),
    "jamba": Family(
        "state-space",
        causal(
            "Jamba",
            **COMMON,
            num_experts=2,
            num_experts_per_tok=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            use_mamba_kernels=False,
            mamba_d_state=4,
        ),
        text,
    ),
    "qwen3_next": Family(
        "state-space",
        causal(
            "Qwen3Next",
            **HEADED,
            **EXPERTS,
            shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        text,
    ),
    "rwkv": Family(
        "state-space",
        causal("Rwkv", vocab_size=VOCAB, hidden_size=DIM, num_hidden_layers=2, attention_hidden_size=DIM),
        lambda: text(4),  # a Python loop over the sequence
    ),
    # encoder-decoders
    "t5": Family(
        "encoder-decoder",
        hf(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCAB,
            d_model=DIM,
            d_ff=48,
            d_kv=8,
            num_heads=4,
            num_layers=2,
            decoder_start_token_id=0,
        ),
        text,
        {"language": 4},
    ),
    "bart": Family(
        "encoder-decoder",
        hf(
            "BartForConditionalGeneration",
            "BartConfig",
            vocab_size=VOCAB,
            d_model=DIM,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            max_position_embeddings=64,
        ),
        text,
        {"language": 4},
    ),
    # encoders
    "bert": Family("encoder", hf("BertForMaskedLM", "BertConfig", **ENCODER), text),
    "albert": Family(
        "encoder",
        hf("AlbertForMaskedLM", "AlbertConfig", **ENCODER, embedding_size=16),
        text,
        {"language": 1},
    ),
    "modernbert": Family("encoder", hf("ModernBertForMaskedLM", "ModernBertConfig", **ENCODER), text),
    # vision
    "vit": Family("vision", hf("ViTModel", "ViTConfig", **VISION), image, {"vision": 2}),
    "dinov2": Family("vision", hf("Dinov2Model", "Dinov2Config", **VISION), image, {"vision": 2}),
    "swin": Family(
        "vision",
        hf(
            "SwinModel",
            "SwinConfig",
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        lambda: {"pixel_values": pixels(32)},
        {"vision": 4},
    ),
    "convnext": Family(
        "vision",
        hf("ConvNextModel", "ConvNextConfig", hidden_sizes=[8, 16], depths=[2, 2], num_stages=2),
        lambda: {"pixel_values": pixels(32)},
        {"vision": 4},
    ),
    "clip": Family(
        "multimodal",
        hf("CLIPModel", "CLIPConfig", text_config=ENCODER, vision_config=VISION, projection_dim=16),
        lambda: {**encoded(), **image()},
        BOTH,
    ),
    # audio
    "wav2vec2": Family(
        "audio",
        hf(
            "Wav2Vec2Model",
            "Wav2Vec2Config",
            **ENCODER,
            conv_dim=(16, 16),
            conv_stride=(4, 4),
            conv_kernel=(8, 8),
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            # Layer drop and time masks draw from NumPy, outside torch's generator.
            layerdrop=0.0,
            apply_spec_augment=False,
        ),
        lambda: {"input_values": torch.randn(2, 400, generator=rng())},
        {"audio": 4},
    ),
    "whisper": Family(
        "audio",
        hf(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=VOCAB,
            d_model=DIM,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        lambda: {"input_features": torch.randn(2, 8, 40, generator=rng()), "labels": text()["labels"]},
        {"audio": 2, "language": 2},
    ),
    # several modalities
    "llava": Family(
        "multimodal",
        llava(
            "Llava",
            text_config=LLAMA_TEXT,
            vision_config={"model_type": "clip_vision_model", "projection_dim": DIM} | VISION,
            vision_feature_layer=-1,
        ),
        with_image,
        BOTH,
    ),
    "gemma3": Family(
        "multimodal",
        hf(
            "Gemma3ForConditionalGeneration",
            "Gemma3Config",
            text_config=HEADED | {"sliding_window": 8},
            vision_config=SIGLIP,
            mm_tokens_per_image=PATCHES // 4,
            image_token_index=IMAGE_TOKEN,
            image_token_id=IMAGE_TOKEN,
        ),
        lambda: with_image(
            PATCHES // 4, token_type_ids=torch.cat([torch.ones(2, PATCHES // 4), torch.zeros(2, 12)], 1).long()
        ),
        BOTH,
    ),
    "mistral3": Family(
        "multimodal",
        hf(
            "Mistral3ForConditionalGeneration",
            "Mistral3Config",
            text_config={"model_type": "mistral"} | HEADED,
            vision_config={"model_type": "pixtral", "head_dim": 8} | VISION,
            image_token_index=IMAGE_TOKEN,
            image_token_id=IMAGE_TOKEN,
            spatial_merge_size=2,
            vision_feature_layer=-1,
        ),
        lambda: with_image(PATCHES // 4, image_sizes=torch.tensor([[SIDE, SIDE]] * 2)),
        BOTH,
    ),
    "smolvlm": Family(
        "multimodal",
        llava("SmolVLM", text_config=LLAMA_TEXT, vision_config=VISION, scale_factor=2),
        lambda: with_image(PATCHES // 4, values=pixels()[:, None]),
        BOTH,
    ),
    "qwen2_vl": Family(
        "multimodal",
        hf(
            "Qwen2VLForConditionalGeneration",
            "Qwen2VLConfig",
            text_config=COMMON
            | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
            vision_config={
                "embed_dim": DIM,
                "hidden_size": DIM,
                "depth": 2,
                "num_heads": 4,
                "patch_size": PATCH,
                "mlp_ratio": 2,
            },
            image_token_id=IMAGE_TOKEN,
            video_token_id=VIDEO_TOKEN,
            vision_start_token_id=START,
            vision_end_token_id=END,
        ),
        qwen_image,
        BOTH,
    ),
    "qwen3_vl": Family(
        "multimodal",
        hf(
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLConfig",
            text_config=HEADED
            | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}},
            vision_config={
                "hidden_size": DIM,
                "intermediate_size": 48,
                "depth": 2,
                "num_heads": 4,
                "patch_size": PATCH,
                "out_hidden_size": DIM,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            image_token_id=IMAGE_TOKEN,
            video_token_id=VIDEO_TOKEN,
            vision_start_token_id=START,
            vision_end_token_id=END,
        ),
        qwen_image,
        {"vision": 3, "language": 2},  # two blocks and one deep-stack merger
    ),
    # plain PyTorch
    "module_list": Family("plain", lambda: Sequence(nn.ModuleList([Block(), Block()])), encoded),
    "module_dict": Family("plain", lambda: Sequence(nn.ModuleDict({"4": Block(), "5": Block()})), encoded),
    "transformer_encoder": Family(
        "plain",
        lambda: Sequence(
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(DIM, 4, 48, batch_first=True), 2, enable_nested_tensor=False
            )
        ),
        encoded,
    ),
    "timm_style": Family("vision", TimmStyle, image, {"vision": 2}),
    "diffusion_transformer": Family("diffusion", DiffusionTransformer, latents, {"other": 5}),
}
