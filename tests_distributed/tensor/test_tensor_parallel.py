"""Tensor parallelism on gloo ranks: equal to one rank under every checkpointing mode, collectives not replayed."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel

from nemo_like import apply_activation_checkpointing, parallelize
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.shard import shard_layers
from nemo_like.distributed.tensor.apply import apply_tensor_parallel
from nemo_like.layers import find_layers
from nemo_like.options import TensorParallel
from tests.checks import assert_bitwise, backward, gradients_of, mean_over_ranks, on_meta, seeded, whole
from tests.models.families import FAMILIES
from tests.models.tied_decoder import DIM, HEADS, VOCAB, Block, TiedDecoder
from tests_distributed.counting import CountOps, heard
from tests_distributed.spawn import on_ranks, run_ranks

MODES = ("none", "full", "selective", "submodule")


PLAIN_PLAN = {
    "blocks.*.attn.[qkv]": "colwise", "blocks.*.attn.out": "rowwise", "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise", "head": "colwise_gather_output",
}  # fmt: skip


def build(name: str, **more: object) -> nn.Module:
    torch.manual_seed(0)
    if name == "plain":
        return TiedDecoder()
    import transformers as hf

    common = {
        "vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 64,
    } | more  # fmt: skip
    config = {
        "llama": hf.LlamaConfig,
        "qwen3": lambda **values: hf.Qwen3Config(tie_word_embeddings=True, **values),
        "mixtral": lambda **values: hf.MixtralConfig(num_local_experts=4, **values),
    }[name](**common)
    return hf.AutoModelForCausalLM.from_config(config)


def plan_of(name: str) -> dict | None:
    return PLAIN_PLAN if name == "plain" else None


def cut(model: nn.Module, plan: Any = None, **options: Any) -> nn.Module:
    """`model`, split over all ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    return apply_tensor_parallel(model, mesh["tp"], plan, **options)


def batch() -> torch.Tensor:
    return torch.randint(VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    output = model(ids)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def step_of(model: nn.Module, ids: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The loss, as ``"loss"``, and the whole gradients by name."""
    return {"loss": backward(loss_of(model, batch() if ids is None else ids)), **gradients_of(model)}


def assert_same_step(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], where: str) -> None:
    """Equal within 1e-5 relative to the largest entry: sums over ranks are added in another order.

    A gradient that is zero but for rounding (that of the keys' bias: softmax does not see it) is measured against the
    other gradients instead.
    """
    assert found.keys() == wanted.keys(), where
    rounding = 1e-2 * max(grad.abs().max() for name, grad in wanted.items() if name != "loss")
    for name, value in wanted.items():
        difference = (found[name] - value).abs().max() / value.abs().max().clamp(min=0.0 if name == "loss" else rounding)
        assert difference < 1e-5, f"{where}, {name}: relative difference {difference:.2e}"


@pytest.mark.few(1)
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", ""])
@pytest.mark.parametrize(
    ("name", "modes"), [("llama", ("none", "selective")), *((name, MODES) for name in ("llama", "qwen3", "plain"))]
)
@on_ranks(4)
def test_fsdp_times_tp_equals_one_rank_in_every_mode(
    rank: int, world_size: int, name: str, modes: tuple[str, ...], sequence_parallel: bool
) -> None:
    wanted = step_of(build(name))
    mesh = build_mesh(tp=2, device_type="cpu")
    ids = batch().chunk(2)[mesh.get_local_rank("dp_shard")]
    for mode in modes:
        model = build(name)
        apply_tensor_parallel(model, mesh["tp"], plan_of(name), sequence_parallel=sequence_parallel)
        apply_activation_checkpointing(model, mode)
        shard_layers(model, find_layers(model), mesh)
        found = step_of(model, ids)
        assert_same_step(found | {"loss": mean_over_ranks(found["loss"])}, wanted, f"{name}, {mode}")


@pytest.mark.few(1)
@pytest.mark.parametrize("modes", [("none", "full", "selective"), ("none", "submodule", "sequential")])
@pytest.mark.parametrize("how", ["sdpa", "eager"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
@on_ranks(2)
def test_attention_dropout_beside_tensor_parallelism(
    rank: int, world_size: int, sequence_parallel: bool, how: str, modes: tuple[str, ...]
) -> None:
    """Every mode draws the numbers that no checkpointing draws, so gradients are the same to the bit."""
    expected: dict[str, torch.Tensor] = {}
    for mode in modes:
        model = build("llama", attention_dropout=0.2, attn_implementation=how).train()
        model = parallelize(model, ac=mode, tp=TensorParallel(world_size, sequence_parallel=sequence_parallel), device="cpu")
        torch.manual_seed(5)
        loss_of(model, batch()).backward()
        found = gradients_of(model)
        expected = expected or found
        assert_bitwise(found, expected, mode)


def _one_dimensional(rank: int, world_size: int, name: str) -> dict[str, bool]:
    model = cut(build(name))
    assert_same_step(step_of(model), step_of(build(name)), name)
    return {parameter: isinstance(value, DTensor) for parameter, value in model.named_parameters()}


def test_styles_of_the_installed_plan() -> None:
    """Styles newer than ours (fused experts) come from the transformers in use."""
    split = run_ranks(2, _one_dimensional, "mixtral")[0]
    assert split["model.layers.0.mlp.experts.gate_up_proj"] and split["lm_head.weight"]
    assert not split["model.layers.0.input_layernorm.weight"]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_selective_replays_no_sum(rank: int, world_size: int, sequence_parallel: bool) -> None:
    """It gathers a cut sequence again: what was gathered is the whole one, which should not be held on every rank."""
    counts = {}
    for mode in ("none", "selective") if sequence_parallel else ("none", "selective", "full"):
        model = cut(build("llama", num_hidden_layers=1), sequence_parallel=sequence_parallel)
        apply_activation_checkpointing(model, mode)
        with CountOps("_c10d_functional") as counter:
            loss_of(model, batch()).backward()
        counts[mode] = Counter(
            {name: count for name, count in counter.counts.items() if not {"wait", "wrap"} & set(name.split("_"))}
        )
    none, selective = counts["none"], counts["selective"]
    assert none["all_reduce"] > 0
    if sequence_parallel:
        assert none["reduce_scatter_tensor"] > 0
        # One gather for attention and one for the MLP; and no cut of the sequence is undone.
        assert selective == none + Counter({"all_gather_into_tensor": 2})
    else:
        assert selective == none
        assert counts["full"]["all_reduce"] > none["all_reduce"], "the counter sees what a replay repeats"


@on_ranks(2)
def test_loss_parallel_head(rank: int, world_size: int) -> None:
    model = cut(build("llama"), loss_parallel=True)
    with loss_parallel():
        logits = model(batch()).logits
        assert logits.to_local().shape[-1] == VOCAB // world_size
        loss = backward(F.cross_entropy(logits[:, :-1].flatten(0, 1), batch()[:, 1:].flatten()))
    assert_same_step({"loss": whole(loss), **gradients_of(model)}, step_of(build("llama")), "loss parallel")


@on_ranks(2)
def test_tied_weights_stay_tied(rank: int, world_size: int) -> None:
    for name in ("plain", "qwen3"):
        model = cut(build(name), plan_of(name))
        head, embed = (model.head, model.embed) if name == "plain" else (model.lm_head, model.model.embed_tokens)
        assert head.weight is embed.weight and head.weight.to_local().shape[0] == VOCAB // world_size


@on_ranks(2)
def test_bad_requests_leave_the_model_untouched(rank: int, world_size: int) -> None:
    cases = [
        ("plain", None, "brings no tensor-parallel plan"),
        (
            "plain",
            {"blocks.*.attn.q": "colwize"},
            r"style 'colwize' \(of 'blocks.*'\) is unknown.*Did you mean 'colwise'",
        ),
        ("plain", {"layers.*.attn.q": "colwise"}, "'layers.*' matches no module"),
        ("plain", {"blocks.*.norm1": "colwise"}, "LayerNorm; the style 'colwise' cuts nn.Linear"),
        ("plain", {"blocks.*.attn.q": 3}, "must be a ParallelStyle"),
        ("plain", ["blocks"], "must map FQN patterns"),
        ("plain", {"head": "rowwise"}, "shares its weight with 'embed'"),
        ("plain", {"blocks.*.mlp.down.weight": "colwise_gather"}, "is unknown"),
        ("llama", {"model.layers.*.mlp": "colwise"}, "LlamaMLP; the style 'colwise'"),
    ]
    for name, plan, message in cases:
        model = build(name)
        with pytest.raises((ValueError, TypeError), match=message):
            cut(model, plan)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), message
        assert loss_of(model, batch()).item() == loss_of(build(name), batch()).item(), "the model is as it was"
    once, two = cut(build("llama")), init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp"))
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: cut(once), ValueError, "already"),
        (lambda: apply_tensor_parallel(build("llama"), two), ValueError, "pass the tensor-parallel one"),
        (lambda: apply_tensor_parallel(build("llama"), world_size), TypeError, "DeviceMesh"),
        (
            lambda: cut(build("plain"), {"blocks.*.mlp.up": "colwise"}, loss_parallel=True),
            ValueError, "does not cut the output head",
        ),
        (
            lambda: cut(build("plain"), {"head": "colwise_gather_output"}, sequence_parallel=True),
            ValueError, "cuts nothing in the layer",
        ),
    ]  # fmt: skip
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()


@on_ranks(4)
def test_heads_and_sizes_must_divide(rank: int, world_size: int) -> None:
    for more, message in [
        ({"num_key_value_heads": 2}, r"num_key_value_heads=2, not divisible by tp=4"),
        (
            {"num_key_value_heads": 4, "intermediate_size": 50},
            r"gate_proj' has 50 output features, not divisible by tp=4",
        ),
        ({"num_key_value_heads": 4, "vocab_size": 66}, r"lm_head' has 66 output features"),
    ]:
        model = build("llama", **more)
        with pytest.raises(ValueError, match=message):
            cut(model)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@on_ranks(2)
def test_odd_sequence_length_is_an_error(rank: int, world_size: int) -> None:
    model = cut(build("llama"), sequence_parallel=True)
    with pytest.raises(ValueError, match="divisible by the 2 tensor-parallel ranks, and got 15"):
        model(batch()[:, :15])


@on_ranks(2)
def test_dtensor_activations_inside_a_region_are_bitwise(rank: int, world_size: int) -> None:
    """What replay hands to backward keeps the sharding it was saved with: gradients are bitwise those of no replay."""
    grads = {}
    for mode in MODES:
        plan = {"mlp.up": ColwiseParallel(use_local_output=False), "mlp.down": RowwiseParallel(use_local_output=False)}
        model = seeded(lambda: nn.Sequential(Block(), Block()))
        cut(model, {f"*.{name}": style for name, style in plan.items()})
        for block in model:
            block.mlp.register_forward_hook(lambda _m, _a, out: out.redistribute(placements=[Replicate()]).to_local())
        apply_activation_checkpointing(model, mode)
        model(torch.ones(2, 8, DIM, requires_grad=True)).square().mean().backward()
        grads[mode] = gradients_of(model)
    assert_bitwise([grads[mode] for mode in MODES], [grads["none"]] * len(MODES))


JambaConfig = pytest.importorskip("transformers").JambaConfig
WITH_A_PLAN = (
    "phi3", "jamba", "deepseek_v3", "llava", "gpt_neox", "gemma3_text", "olmo2", "qwen3_moe", "olmoe", "qwen3_next",
    "gemma3", "mistral3", "smolvlm", "qwen2_vl",
)  # fmt: skip


def _own_plans(rank: int, world_size: int, names: tuple[str, ...]) -> dict[str, int]:
    """How many weights each family's own plan cuts; its step is that of one rank."""
    counts = {}
    for name in names:
        family = FAMILIES[name]
        # eval(): ranks would draw dropout masks for their own heads.
        reference, model = family.build().eval(), cut(family.build().eval())
        wanted, found = ({"loss": backward(family.step(each)), **gradients_of(each)} for each in (reference, model))
        assert_same_step(found, wanted, name)
        counts[name] = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
    return counts


@pytest.mark.few(1)
@pytest.mark.parametrize("names", [WITH_A_PLAN[:5], WITH_A_PLAN[5:]])
def test_the_own_plan_of_every_family_that_has_one(names: tuple[str, ...]) -> None:
    counts = run_ranks(2, _own_plans, names, timeout=200)[0]
    if not JambaConfig.base_model_tp_plan:
        return  # an older transformers, whose plans cut less: only the steps are compared
    # Jamba's plan names its experts and embeddings alone; all others cut attention and MLP in both layers.
    assert counts.pop("jamba", 4) == 4
    assert all(count >= 10 for count in counts.values()), counts


def _head_alone(rank: int, world_size: int) -> list[str]:
    said = heard()
    cut(FAMILIES["qwen3_vl"].build())
    return said


def test_a_plan_for_the_head_alone_is_announced() -> None:
    if set(FAMILIES["qwen3_vl"].build().tp_plan) != {"lm_head"}:
        pytest.skip("this transformers has a plan for Qwen3-VL's layers")
    said, silent = run_ranks(2, _head_alone)
    assert len(said) == 1 and "cuts lm_head and nothing in its layers" in said[0] and silent == []


@on_ranks(2)
def test_models_on_the_meta_device_stay_there(rank: int, world_size: int) -> None:
    shapes = []
    for name in ("llama", "mixtral"):
        model = cut(on_meta(build, name))
        weight = model.model.layers[0].self_attn.q_proj.weight
        assert all(parameter.is_meta for parameter in model.parameters()) and weight.shape == (DIM, DIM)
        shapes.append(tuple(weight.to_local().shape))
    assert shapes == [(DIM // 2, DIM)] * 2
