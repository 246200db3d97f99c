"""Experts beside what training does with them: balancing, adapters, other precisions, models that come in split."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import parallelize
from nemo_like.distributed.expert.split_experts import Experts, SplitExperts
from nemo_like.options import PipelineParallel
from nemo_like.torch_compat import fake_tensor_types
from tests.checks import assert_bitwise, assert_near, gradients_of, seeded, step
from tests.models.blocks import Operators
from tests.models.expert_families import build, tokens
from tests.said import said
from tests_distributed.expert.whole_gradients import assert_trains, expected
from tests_distributed.spawn import on_ranks, run_ranks


@on_ranks(2)
def test_an_auxiliary_loss_is_that_without_ep(rank: int, world_size: int) -> None:
    ids = tokens(world_size)[rank : rank + 1]
    auxiliary, found = [], []
    for ep in (1, 2):
        model = build("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
        model = parallelize(model, ac="full", ep=ep, device="cpu")
        model.register_forward_hook(lambda _module, _args, out: auxiliary.append(out.aux_loss.item()))
        found.append(step(model, input_ids=ids, labels=ids))
    assert auxiliary[0] > 0 and auxiliary[1] == pytest.approx(auxiliary[0], rel=1e-6)
    assert abs(found[1]["loss"] - found[0]["loss"]) <= 1e-6 * found[0]["loss"]
    assert_near(found[1], found[0], least=1e-8)


@on_ranks(2)
def test_in_bfloat16(rank: int, world_size: int) -> None:
    mine = tokens(world_size)[rank : rank + 1]
    whole, plain, selective = (
        step(parallelize(build("mixtral"), ac=ac, ep=ep, precision="bf16", device="cpu"), input_ids=mine, labels=mine)
        for ep, ac in ((1, "none"), (2, "none"), (2, "selective"))
    )
    assert all(grad.dtype == torch.float32 for name, grad in plain.items() if name != "loss")
    assert_bitwise(selective, plain)
    assert_near(plain, whole, 0.03, least=1e-8)  # the same routing, sums of bfloat16 in another order


@on_ranks(2)
def test_under_autocast_one_product_computes_all_experts(rank: int, world_size: int) -> None:
    ids = tokens(world_size)[rank : rank + 1]
    found = []
    for ep in (1, 2):
        model = parallelize(build("mixtral", experts_implementation="grouped_mm"), ac="none", ep=ep, device="cpu")
        with torch.autocast("cpu", torch.bfloat16), Operators() as forward:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert forward.kernels.count("_grouped_mm.default") == 2 * len(model.model.layers), forward.kernels
        found.append(gradients_of(model))
    assert_near(found[1], found[0], 0.03, least=1e-8)  # sums of bfloat16 in another order


def test_float32_on_a_gpu_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    experts = build("mixtral").model.layers[0].mlp.experts
    split = SplitExperts(Experts("mlp.experts", experts, 4, "routed"), ranks=1, group="", rank=0, tp=None, adapters=())
    with fake_tensor_types()[1]():
        rows = torch.empty(3, 4, device="cuda")
    assert [split.computes_in(rows), split.computes_in(rows)] == [torch.float32] * 2
    (record,) = said(caplog)
    assert record.message.startswith("Experts compute in torch.float32, one product for each: ")


@pytest.mark.few(1)
@pytest.mark.parametrize("ep", [4, 2])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@on_ranks(4, timeout=90)
def test_beside_context_parallel(rank: int, world_size: int, name: str, ep: int) -> None:
    ids = tokens(2, 16)
    mine = ids[rank // 2 : rank // 2 + 1]  # both ranks of a cp pair are given the same whole sequence
    way = {"ac": "full", "cp": 2, "ep": ep}
    assert_trains(partial(build, name), expected(name, ids), {"input_ids": mine, "labels": mine}, way)


def _came_in_split(rank: int, world_size: int, folder: str) -> None:
    from transformers import MixtralForCausalLM
    from transformers.distributed import DistributedConfig

    ids = tokens(world_size)
    wanted = expected("mixtral", ids)
    mine = ids[rank : rank + 1]
    plain: dict[str, torch.Tensor] = {}
    for ac in ("none", "selective"):
        config = DistributedConfig(fsdp_size=2, ep_size=2)
        model = MixtralForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32).train()
        if ac == "none":
            with pytest.raises(ValueError, match="split and sharded by transformers"):
                parallelize(model, ep=2)
        shards = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
        model = parallelize(model, ac=ac)
        assert all(shards[n.replace("_checkpoint_wrapped_module.", "")] is p for n, p in model.named_parameters())
        found = step(model, input_ids=mine, labels=mine)
        plain = plain or found
        assert_bitwise(found, plain, ac)
        assert_near(found | {"loss": wanted["loss"]}, wanted, least=1e-8)
        with pytest.raises(ValueError, match="parallelized already"):
            parallelize(model)


def test_a_model_that_transformers_has_split_is_taken_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed", reason="transformers before 5.23 splits no experts")
    build("mixtral").save_pretrained(tmp_path)
    run_ranks(2, _came_in_split, str(tmp_path), timeout=90)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral"])  # the former's first layer has none: a stage without any
@on_ranks(4, timeout=120)
def test_in_a_pipeline(rank: int, world_size: int, name: str) -> None:
    ids = tokens(4)
    mine = ids.chunk(2)[rank % 2]
    wanted = expected(name, ids)
    sample = {"input_ids": mine[:1], "labels": mine[:1]}
    stages = PipelineParallel(2, microbatches=2)
    pipeline = parallelize(build(name), ac="full", pp=stages, ep=2, device="cpu", sample_input=sample)
    pipeline.step(input_ids=mine, labels=mine)
    found = gradients_of(pipeline)
    assert len([key for key in found if ".experts." in key]) == (0 if name == "deepseek_v3" and rank < 2 else 2)
    assert_near(found, {key: wanted[key] for key in found}, least=1e-8)


TARGETS = {"mixtral": "mlp", "gpt_oss": "mlp", "llama4": "feed_forward"}


def _adapted(name: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = build(name)
    weights = [f"{TARGETS[name]}.experts.{weight}" for weight in ("gate_up_proj", "down_proj")]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=weights, init_lora_weights=False)
    model = seeded(get_peft_model, model, config, seed=1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.2)
    return model


MODES = ("none", "full", "selective", "50%")


def _trained(rank: int, world_size: int, name: str, modes: tuple[str, ...] = MODES) -> None:
    ids = tokens(world_size)
    mine = {"input_ids": ids[rank : rank + 1], "labels": ids[rank : rank + 1]}
    wanted = step(_adapted(name), input_ids=ids, labels=ids)
    assert sum(".experts." in key for key in wanted) == 2 * 2 * 2  # layers, weights, factors
    model: Any = assert_trains(partial(_adapted, name), wanted, mine, *[{"ac": mode, "ep": 2} for mode in modes])
    with model.disable_adapter():
        with torch.no_grad():
            found = model(**mine).loss
        bare = build(name)(**mine).loss
        assert abs(found - bare) <= 1e-6 * bare


@pytest.mark.few(1)
@pytest.mark.parametrize("modes", [("full", "50%"), MODES])
@pytest.mark.parametrize(("name", "ranks"), [("mixtral", 2), ("gpt_oss", 2), ("llama4", 2), ("mixtral", 4)])
def test_adapters_on_the_weights_of_experts(name: str, ranks: int, modes: tuple[str, ...]) -> None:
    run_ranks(ranks, _trained, name, modes, timeout=120)


def _beside_tp(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=re.escape("adapters on the weights of 'base_model.model.model.layers.0.mlp")):
        parallelize(_adapted("mixtral"), ep=2, tp=2, device="cpu")


def test_beside_tensor_parallelism_they_are_refused() -> None:
    run_ranks(2, _beside_tp)


@on_ranks(4)
def test_experts_are_gathered_before_the_layer_ahead_of_them_computes(rank: int, world_size: int) -> None:
    """Forward and backward, by the order in which a profile has the gathers and the layers' attention."""
    model = parallelize(build("mixtral"), ac="none", ep=2, device="cpu")
    ids = tokens(world_size)[rank : rank + 1]
    model(input_ids=ids, labels=ids).loss.backward()  # the first step initialises
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(lambda *_, n=number: _mark(f"forward {n}"))
        layer.self_attn.register_full_backward_hook(lambda *_, n=number: _mark(f"backward {n}"))
    with torch.profiler.profile() as profile:
        model(input_ids=ids, labels=ids).loss.backward()
    names = [e.name for e in sorted(profile.events(), key=lambda e: e.time_range.start)]
    at = {kind: [n for n, name in enumerate(names) if name.startswith(kind)] for kind in ("forward", "backward")}
    gathered = re.compile(r"FSDP::all_gather \(model\.layers\.(\d)\.mlp\.experts\)")
    found = [(n, int(match[1])) for n, name in enumerate(names) if (match := gathered.match(name))]
    last = len(model.model.layers) - 1
    first, again = ({layer: n for n, layer in part} for part in (found[: last + 1], found[last + 1 :]))
    assert first.keys() == set(range(last + 1)) and again.keys() >= set(range(last))
    assert all(first[layer + 1] < at["forward"][layer] for layer in range(last))
    assert all(again[layer - 1] < at["backward"][last - layer] for layer in range(1, last + 1))


def _mark(name: str) -> None:
    with torch.profiler.record_function(name):
        pass
