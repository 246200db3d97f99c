"""The table of YAML of Megatron, also as NeMo and Megatron Bridge write it."""

from collections.abc import Iterator
from typing import Any

from nemo_like.settings.formats import NAMES, WHOLE, Format, ac_of, only, switch, words

# By word of ``recompute_modules``: the modules that are recomputed.
RECOMPUTED = {
    "mlp": "mlp",
    "moe": "mlp",
    "moe_act": "mlp.experts.act_fn",
    "shared_experts": "mlp.shared_experts",
    "layernorm": "*norm*",
    "mla_up_proj": "self_attn.*_b_proj",
}
# By word of ``offload_modules``: the tensors that wait in CPU memory, which are the inputs of these modules there.
OFFLOADED = {
    "attn_norm": ["input_layernorm.input"],
    "core_attn": ["attention.q", "attention.k", "attention.v"],
    "attn_proj": ["self_attn.o_proj.input"],
    "mlp_norm": ["post_attention_layernorm.input"],
    "expert_fc1": ["experts.1.input"],
    "moe_act": ["experts.1"],
    "qkv_linear": ["self_attn.q_proj.input"],
}
REASONS = {"core_attn": ": attention's kernel is fused, and keeps only its output"}


def _finish(values: dict[str, Any]) -> Iterator[str]:
    usual = values.pop("_granularity", "none")
    recompute = [] if usual == "full" else values.pop("_recomputed", [])
    offload = values.pop("_offloaded", []) if values.pop("_offloads", True) else []
    yield from (f"recompute_modules = {word}{REASONS.get(word, '')}" for word in recompute if word not in RECOMPUTED)
    inside = [RECOMPUTED[word] for word in recompute if word in RECOMPUTED]
    moved = [] if inside else [name for word in offload for name in OFFLOADED.get(word, ())]
    yield from (f"offload_modules = {word}" for word in offload if word not in OFFLOADED or inside)
    lists = {"offload": moved, "recompute": inside}
    if usual == "none" and moved:
        yield f"offload_modules = {', '.join(offload)} (there the rest of a layer is kept, and here it is recomputed)"
    values["ac"] = ac_of(usual, **lists)


# Keys: `TransformerConfig` and `ModelParallelConfig` of megatron/core, which Megatron Bridge has under ``model``, and the
# batch under ``train``.
TABLE = Format(
    framework="Megatron",
    marks=tuple(f"{table}recompute_{key}" for table in ("", "model.") for key in ("granularity", "modules")),
    keys={
        "recompute_granularity": ("_granularity", words({"full": "full", "selective": "none"}, others=False)),
        "recompute_modules": ("_recomputed", NAMES),
        "recompute_method": ("", only("uniform")),
        "recompute_num_layers": ("", only(1)),
        "distribute_saved_activations": ("", only(False)),
        "fine_grained_activation_offloading": ("_offloads", switch()),
        "offload_modules": ("_offloaded", NAMES),
        "tensor_model_parallel_size": ("tp", WHOLE),
        "pipeline_model_parallel_size": ("pp", WHOLE),
        "context_parallel_size": ("cp", WHOLE),
        "expert_model_parallel_size": ("ep", WHOLE),
        "sequence_parallel": ("sequence_parallel", switch()),
        "micro_batch_size": ("batch_size", WHOLE),
        "global_batch_size": ("global_batch", WHOLE),
        "seq_length": ("seq_len", WHOLE),
    },
    ignored=(
        *("*_target_", "train_iters", "eval_*", "checkpoint.*", "dataset.*", "logger.*", "profiling.*", "rng.*"),
        *("scheduler.*", "tokenizer.*"),
    ),
    renamed=((r"^(model|train)\.", ""),),
    finish=_finish,
)
