"""Experts beside what training does with them: balancing, adapters, other precisions, models that come in split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nemo_like import parallelize
from nemo_like.distributed import build_mesh
from nemo_like.distributed.expert import balanced_bias, summed_expert_load, watch_expert_load
from nemo_like.options import PipelineParallel
from tests.models.expert_families import build, tokens
from tests_distributed.expert.whole_gradients import assert_close, expected, gradients
from tests_distributed.spawn import on_ranks, run_ranks


@on_ranks(2)
def test_an_auxiliary_loss_is_that_without_ep(rank: int, world_size: int) -> None:
    ids = tokens(world_size)[rank : rank + 1]
    found = []
    for ep in (1, 2):
        model = build("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
        model = parallelize(model, ac="full", ep=ep, device="cpu")
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        found.append((out.loss.item(), out.aux_loss.item(), gradients(model)))
    (loss, auxiliary, wanted), (split, same, mine) = found
    assert auxiliary > 0 and split == pytest.approx(loss, rel=1e-6) and same == pytest.approx(auxiliary, rel=1e-6)
    assert_close(mine, wanted)


def _routers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if hasattr(m, "e_score_correction_bias")}


def _balanced(rank: int, world_size: int, ep: int, tp: int) -> dict[str, list[float]]:
    ids = tokens(4, seed=5)
    rows = 4 * tp // world_size
    ids = ids[rank // tp * rows : (rank // tp + 1) * rows]
    mesh = build_mesh(device_type="cpu", tp=tp) if world_size > 1 else None
    model = parallelize(build("deepseek_v3"), ac="full", mesh=mesh, ep=ep, tp=tp, device="cpu")
    found = {}
    for _ in range(3):
        with watch_expert_load(model) as counts:
            model(input_ids=ids, labels=ids).loss.backward()
        load = summed_expert_load(counts, mesh)
        (name, tokens_of), (_, router) = next(iter(load.items())), next(iter(_routers(model).items()))
        assert tokens_of.sum() == 4 * 12 * 2, "every token is counted once, also where it is replayed or shared by tp"
        bias = router.e_score_correction_bias
        bias.copy_(balanced_bias(bias, tokens_of, 0.05))
        found[name.replace("_checkpoint_wrapped_module.", "")] = bias.tolist()
    return found


def test_a_bias_that_follows_the_load_is_the_same_on_any_ranks() -> None:
    whole = run_ranks(1, _balanced, 1, 1)[0]
    assert any(value != 0 for values in whole.values() for value in values)
    for ranks, ep, tp in ((2, 1, 1), (2, 2, 1), (4, 4, 2)):
        assert run_ranks(ranks, _balanced, ep, tp, timeout=90) == [whole] * ranks


@on_ranks(2)
def test_in_bfloat16(rank: int, world_size: int) -> None:
    mine = tokens(world_size)[rank : rank + 1]
    found = {}
    for ep, ac in ((1, "none"), (2, "none"), (2, "full"), (2, "selective")):
        model = parallelize(build("mixtral"), ac=ac, ep=ep, precision="bf16", device="cpu")
        model(input_ids=mine, labels=mine).loss.backward()
        found[ep, ac] = gradients(model)
    whole, plain = found[1, "none"], found[2, "none"]
    assert all(grad.dtype == torch.float32 for grad in plain.values())
    for ac in ("full", "selective"):
        assert all(torch.equal(found[2, ac][name], plain[name]) for name in plain), ac
    assert_close(plain, whole, tolerance=0.03)  # the same routing, sums of bfloat16 in another order


@on_ranks(4, timeout=90)
def test_beside_context_parallel(rank: int, world_size: int) -> None:
    ids = tokens(2, 16)
    for name in ("mixtral", "qwen3_moe"):
        _, wanted = expected(name, ids)
        mine = ids[rank // 2 : rank // 2 + 1]  # both ranks of a cp pair are given the same whole sequence
        for ep in (2, 4):
            model = parallelize(build(name), ac="full", cp=2, ep=ep, device="cpu")
            model(input_ids=mine, labels=mine).loss.backward()
            assert_close(gradients(model), wanted)


def _came_in_split(rank: int, world_size: int, folder: str) -> None:
    from transformers import MixtralForCausalLM
    from transformers.distributed import DistributedConfig

    ids = tokens(world_size)
    _, wanted = expected("mixtral", ids)
    mine = ids[rank : rank + 1]
    plain = None
    for ac in ("none", "full", "selective"):
        config = DistributedConfig(fsdp_size=2, ep_size=2)
        model = MixtralForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32).train()
        if ac == "none":
            with pytest.raises(ValueError, match="split and sharded by transformers"):
                parallelize(model, ep=2)
        shards = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
        model = parallelize(model, ac=ac)
        assert all(shards[n.replace("_checkpoint_wrapped_module.", "")] is p for n, p in model.named_parameters())
        model(input_ids=mine, labels=mine).loss.backward()
        found = gradients(model)
        assert_close(found, wanted)
        plain = found if plain is None else plain
        assert all(torch.equal(found[name], plain[name]) for name in plain), ac
        with pytest.raises(ValueError, match="parallelized already"):
            parallelize(model)


def test_a_model_that_transformers_has_split_is_taken_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed", reason="transformers before 5.23 splits no experts")
    build("mixtral").save_pretrained(tmp_path)
    run_ranks(2, _came_in_split, str(tmp_path), timeout=90)


def _in_a_pipeline(rank: int, world_size: int) -> dict[str, float]:
    ids = tokens(4)
    mine = ids[2 * (rank % 2) : 2 * (rank % 2) + 2]
    errors = {}
    for name in ("mixtral", "deepseek_v3"):  # the latter's first layer has no experts: a stage without any
        _, wanted = expected(name, ids)
        sample = {"input_ids": mine[:1], "labels": mine[:1]}
        stages = PipelineParallel(2, microbatches=2)
        pipeline = parallelize(build(name), ac="full", pp=stages, ep=2, device="cpu", sample_input=sample)
        pipeline.step(input_ids=mine, labels=mine)
        trained = {n: p for n, p in pipeline.named_parameters() if p.grad is not None}
        for n, p in trained.items():
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            bare = n.replace("_checkpoint_wrapped_module.", "")
            errors[f"{name} {bare}"] = float((grad - wanted[bare]).norm() / wanted[bare].norm())
    return errors


def test_in_a_pipeline() -> None:
    errors = {name: error for found in run_ranks(4, _in_a_pipeline, timeout=120) for name, error in found.items()}
    assert len([name for name in errors if ".experts." in name]) == 2 * 2 + 2
    assert max(errors.values()) <= 1e-5, errors
