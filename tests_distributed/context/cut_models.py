"""Models, batches and comparisons for context parallelism: cut over ranks against whole on one."""

import copy
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like import parallelize
from nemo_like._util.module_tree import bare_name
from tests.checks import backward, gradients_of
from tests.models.blocks import in_turn
from tests.models.families import COMMON, FAMILIES, HEADED, VOCAB, hf, text
from tests.models.tied_decoder import Attention, TiedDecoder

LENGTH = 13
"""Divides nothing: padding at the end for 2 and for 4 ranks."""
LOSS, GRADIENT = 1e-6, 1e-5


class NanoGPT(TiedDecoder):
    """A plain model whose forward computes its own loss, as nanoGPT's: (idx, targets) to (logits, loss)."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        logits = super().forward(idx)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class NanoBERT(NanoGPT):
    """Looks both ways, with no mask."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attn = BothWays()


class BothWays(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OwnAttention(NanoGPT):
    """Computes attention by hand: nothing says that its layers look along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attn.forward = types.MethodType(_by_hand, block.attn)  # type: ignore[method-assign, assignment]


def _by_hand(self: Any, x: Tensor) -> Tensor:
    q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q, self.k, self.v))
    scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), float("-inf"))
    return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Rotated(NanoGPT):
    """Counts positions inside its layers, by no table that could be seen."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embed(idx) * (1 + torch.linspace(0, 1, 64)[: idx.shape[1], None])
        return self.head(self.norm(in_turn(self.blocks, x))), None


_CHOOSING: dict[str, Any] = {
    **COMMON, "num_key_value_heads": 4, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 2, "index_topk": 2, "index_n_heads": 32, "index_head_dim": 16,
}  # fmt: skip
"""Each token sees two of those before it; of many heads, so that no scores are equal."""
_GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4}
_EXPERTS = {"intermediate_size_mlp": 48, "num_local_experts": 2}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    # Soft caps, and sliding windows.
    "gemma2": hf("Gemma2ForCausalLM", "Gemma2Config", **HEADED, sliding_window=4, attn_implementation="eager"),
    # Chunked attention.
    "llama4": hf("Llama4ForCausalLM", "Llama4TextConfig", **HEADED, **_EXPERTS, attention_chunk_size=4),
    # Its last layer scales queries by positions that it counts itself.
    "llama4_tuned": hf(
        "Llama4ForCausalLM", "Llama4TextConfig", **HEADED, **_EXPERTS, attention_chunk_size=64, no_rope_layers=[1, 0],
        floor_scale=3, attn_scale=1.0,
    ),
    "gemma3_text": hf(
        "Gemma3ForCausalLM", "Gemma3TextConfig", **HEADED, sliding_window=4, attn_implementation="eager",
        layer_types=["sliding_attention", "full_attention"], attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
    ),
    "gpt2": hf("GPT2LMHeadModel", "GPT2Config", **_GPT, n_positions=64),
    # Views what attention returns.
    "jetmoe": hf(
        "JetMoeForCausalLM", "JetMoeConfig", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2,
        num_key_value_heads=2, kv_channels=8, intermediate_size=48, num_local_experts=4, max_position_embeddings=64,
    ),
    "gptj": hf("GPTJForCausalLM", "GPTJConfig", **_GPT, rotary_dim=4),
    "codegen": hf("CodeGenForCausalLM", "CodeGenConfig", **_GPT, rotary_dim=4, n_positions=64),
    "gpt_neo": hf(
        "GPTNeoForCausalLM", "GPTNeoConfig", vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]], window_size=4, max_position_embeddings=64,
    ),
    "stablelm": hf("StableLmForCausalLM", "StableLmConfig", **COMMON),
    "deepseek_v32": hf("DeepseekV32ForCausalLM", "DeepseekV32Config", **_CHOOSING),
    "glm_moe_dsa": hf("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", **_CHOOSING),
    "deepseek_v4": hf(
        "DeepseekV4ForCausalLM", "DeepseekV4Config", **_CHOOSING | {"num_key_value_heads": 1, "head_dim": 8},
        o_groups=2, o_lora_rank=8, layer_types=["heavily_compressed_attention"] * 2,
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    """The family's model without dropout: it would draw other numbers for a part than for the whole."""
    if name.endswith("+flex"):
        model: Any = build(name.removesuffix("+flex"))
        model.set_attn_implementation("flex_attention")
        return model
    torch.manual_seed(0)
    plain = {"nanogpt": NanoGPT, "nanobert": NanoBERT, "own_attention": OwnAttention, "rotated": Rotated}
    if name in plain:
        return plain[name]()
    if name in OTHERS:
        return without_dropout(OTHERS[name]().float().train())
    return without_dropout(FAMILIES[name].build())


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "dropout_prob", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def batch(name: str, seed: int = 3, rows: int = 2, length: int = LENGTH) -> dict[str, Any]:
    """Whole sequences, some labels of which do not count."""
    family = FAMILIES.get(name)
    if family is not None and family.kind == "multimodal":
        return dict(family.inputs())
    ids = torch.randint(1, 48, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :4] = -100
    if name in ("nanogpt", "nanobert"):
        return {"idx": ids, "targets": labels.masked_fill(labels == -100, -1)}
    return text() | {"input_ids": ids, "labels": labels}


def loss_of(output: Any) -> Tensor:
    return output[1] if isinstance(output, tuple) else output.loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By names of the original model, whole."""
    return {bare_name(name): grad for name, grad in gradients_of(model).items()}


def step(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """One forward and backward; the gradients are taken away again."""
    loss, found = backward(loss_of(model(**inputs))), gradients(model)
    model.zero_grad()
    return loss.item(), found


Step = tuple[float, Mapping[str, Tensor]]
"""A loss, and gradients by name."""


def off(found: Step, expected: Step, loss: float = LOSS) -> list[str]:
    """Where one step is not another: its loss, by more than `loss` of it, and `differences` of gradients."""
    return off_loss(found[0], expected[0], loss) + differences(found[1], expected[1])


def off_loss(found: float, expected: float, loss: float = LOSS) -> list[str]:
    return [] if abs(found - expected) <= loss * abs(expected) else [f"loss {found} for {expected}"]


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """The gradients that are off by more than `GRADIENT`, relative to their norm.

    Some have none in truth (the keys' bias: softmax does not see it): their scale is a hundredth of the largest, of which
    float32 resolves `GRADIENT`.
    """
    least = 1e-2 * max(grad.norm().item() for grad in expected.values())
    off = []
    for name, grad in expected.items():
        if name not in found:
            off += [f"{name} has no gradient"] if grad.any() else []
            continue
        error = (found[name] - grad).norm().item() / max(grad.norm().item(), least)
        if not error < GRADIENT:
            off.append(f"{name}: {error:.1e}")
    return off


def wrong_in_modes(whole: nn.Module, inputs: Mapping[str, Any], cp: Any, modes: Sequence[str]) -> list[str]:
    """Where cut sequences are not those of one process under some mode, or not with the bits of the first one."""
    expected = step(copy.deepcopy(whole), inputs)
    wrong: list[str] = []
    first: dict[str, Tensor] = {}
    for mode in modes:
        sample = inputs if mode == "50%" else None
        found = step(parallelize(copy.deepcopy(whole), ac=mode, cp=cp, sample_input=sample), inputs)
        wrong += [f"{mode}: {text}" for text in off(found, expected)]
        first = first or found[1]
        wrong += [f"{mode}: {name} is not as without" for name, grad in found[1].items() if not grad.equal(first[name])]
    return wrong
