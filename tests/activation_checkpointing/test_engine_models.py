"""Blocks of transformers, a plain one and Reformer's: held bytes, routers that write in place. Known failures 2 and 3."""

import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_like._util.live_bytes import LiveBytes
from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing.checkpointed import Checkpointed
from nemo_like.activation_checkpointing.engine.region import Region
from nemo_like.activation_checkpointing.policy import FullPolicy, SelectivePolicy
from tests.checks import assert_bitwise, seeded, step
from tests.models.blocks import Stack, under
from tests.models.decoders import PlainBlock

transformers = pytest.importorskip("transformers")

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, use_cache=False,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
}
ROUTERS = {
    "mixtral": CONFIGS["mixtral"],
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=16),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SMALL, **EXPERTS),
    "olmoe": lambda: transformers.OlmoeConfig(
        **{key: value for key, value in SMALL.items() if key != "head_dim"},
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **SMALL, **EXPERTS, shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    ),
}  # fmt: skip


def build(config):
    model = seeded(transformers.AutoModelForCausalLM.from_config, config).float().train()
    return model, model.model.layers


def wrap(layers, policy):
    for index, layer in enumerate(layers):
        Checkpointed(layer, policy, name=f"model.layers.{index}").put()


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
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: captured.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    model(input_ids=torch.arange(32).view(2, 16) % 64)
    hook.remove()
    args = [
        a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a for a in captured["args"]
    ]
    kwargs = captured["kwargs"]
    region = Region(layer.forward.call, policy, "", None, True)
    region.forward(args, kwargs)
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


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its layers draw a seed from the operating system for every forward; two runs compare only with equal seeds."""

    def restart() -> None:
        counter = itertools.count(5)

        def seed() -> int:
            number = next(counter)
            torch.manual_seed(number)
            return number

        monkeypatch.setattr(torch, "seed", seed)

    return restart


def _gradients(ac: str, kinds: list[str], dropout: float) -> list[Tensor | None]:
    config = transformers.ReformerConfig(
        attn_layers=kinds, hidden_size=32, num_attention_heads=2, attention_head_size=16, axial_pos_embds=False,
        feed_forward_size=48, vocab_size=64, max_position_embeddings=32, local_attn_chunk_length=8,
        lsh_attn_chunk_length=8, num_buckets=4, num_hashes=2, is_decoder=True, use_cache=False,
        hidden_dropout_prob=dropout, local_attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    model = under(ac, lambda: transformers.ReformerModel(config).train())
    for _ in range(2):
        out = model(input_ids=torch.arange(32)[None] % 64, attention_mask=torch.ones(1, 32)).last_hidden_state
        out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kinds", [["local", "local"], ["lsh", "lsh"], ["local", "lsh"]], ids="-".join)
@pytest.mark.parametrize("ac", ["full", "selective", "submodule", "sequential"])
def test_reversible_layers_train_as_without_checkpointing(
    ac: str, kinds: list[str], dropout: float, seeds: Any
) -> None:
    seeds()
    expected = _gradients("none", kinds, dropout)
    seeds()
    assert_bitwise(_gradients(ac, kinds, dropout), expected)


TOKENS, WIDTH, HEADS = 1024, 512, 8
UNIT = TOKENS * WIDTH * 4  # one (1, T, D) float32 tensor


def held(ac: str) -> float:
    """Bytes held per block after forward, its input included and its output not."""
    model = under(ac, lambda: Stack(PlainBlock(WIDTH, HEADS, dropout=0.0) for _ in range(2)))
    with LiveBytes() as live:
        out = model(torch.randn(1, TOKENS, WIDTH, requires_grad=True))
        graph = out.grad_fn
        del out
        total = live.live
        del graph
        # Nothing is left without the garbage collector's help: no reference cycle holds activations.
        assert live.live == 0
    return total / 2


def test_each_mode_holds_what_is_counted_by_hand() -> None:
    found = {ac: held(ac) for ac in ("none", "full", "selective", "submodule")}
    assert found["full"] == UNIT
    # All four linears have a bias and are `addmm`, which the default set keeps every time. By hand, in units of (T, D):
    # input 1, qkv 3, attention output 1, its projection 1, the MLP's first linear 4. The MLP's second linear is read by
    # the residual sum alone, whose backward reads nothing: not held. Attention also keeps a log-sum-exp, float32 (H, T).
    assert found["selective"] == pytest.approx((1 + 3 + 1 + 1 + 4) * UNIT + HEADS * TOKENS * 4, rel=0.02)
    # Known failure 6: sub-module wrapping keeps each piece's input (two norms, attention, MLP), whole layers one.
    assert found["none"] > found["submodule"] > found["full"]
    assert found["submodule"] == pytest.approx(4 * UNIT, rel=0.02)
