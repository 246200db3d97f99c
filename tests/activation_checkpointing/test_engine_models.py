"""Blocks of transformers: held bytes to the byte, routers that write in place. Known failures 2 and 3."""

import gc

import pytest
import torch

from nemo_like._util.live_bytes import LiveBytes
from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing.engine.region import Region
from nemo_like.activation_checkpointing.policy import FullPolicy, SelectivePolicy
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper
from tests.checks import assert_bitwise, step

hf = pytest.importorskip("transformers")

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, use_cache=False,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
CONFIGS = {
    "llama": lambda: hf.LlamaConfig(**SMALL),
    "qwen3": lambda: hf.Qwen3Config(**SMALL),
    "mixtral": lambda: hf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
}
ROUTERS = {
    "mixtral": CONFIGS["mixtral"],
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=16),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**SMALL, **EXPERTS),
    "olmoe": lambda: hf.OlmoeConfig(
        **{key: value for key, value in SMALL.items() if key != "head_dim"},
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **SMALL, **EXPERTS, shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    ),
}  # fmt: skip


def build(config):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).float().train()
    return model, model.model.layers


def wrap(layers, policy):
    for index, layer in enumerate(layers):
        layers[index] = CheckpointWrapper(layer, policy=policy, name=f"model.layers.{index}")


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "policy", [SelectivePolicy(), SelectivePolicy(every_nth_matmul=None)], ids=["selective", "kept"]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_held_bytes_are_the_sum_of_the_save_decisions_to_the_byte(name, policy):
    model, layers = build(CONFIGS[name]())
    wrap(layers, policy)
    captured = {}
    layer = layers[0]
    hook = layer._checkpoint_wrapped_module.register_forward_pre_hook(
        lambda _, args, kwargs: captured.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    model(input_ids=torch.arange(32).view(2, 16) % 64)
    hook.remove()
    args = [
        a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a for a in captured["args"]
    ]
    kwargs = captured["kwargs"]
    region = Region(layer._checkpoint_wrapped_module, policy, "", None, True)
    region.forward(args, kwargs, True)
    kept = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for e in region.kept for t in tensors_in(e.value)
    }
    del region
    gc.collect()
    with LiveBytes() as live:
        out = layer(*args, **kwargs)
        held = live.live - (out if isinstance(out, torch.Tensor) else out[0]).untyped_storage().nbytes()
    assert held == sum(kept.values()) > 0


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_that_normalise_in_place_train_bitwise(name):
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    model, _ = build(ROUTERS[name]())
    wanted = step(model, input_ids=ids, labels=ids)
    for policy in (SelectivePolicy(), FullPolicy()):
        model, layers = build(ROUTERS[name]())
        wrap(layers, policy)
        assert_bitwise(step(model, input_ids=ids, labels=ids), wanted)
