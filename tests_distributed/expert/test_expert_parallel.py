"""`parallelize(ep=...)` against one process on the whole batch: the same loss, the same gradients, for every family."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import parallelize
from nemo_like.distributed import clip_grad_norm_
from nemo_like.options import FSDP2, ExpertParallel
from tests.checks import assert_near, mean_over_ranks, refused_unchanged, step
from tests.models.expert_families import NAMES, build, tokens
from tests.models.tiny import llama
from tests_distributed.expert.whole_gradients import assert_trains, expected
from tests_distributed.spawn import on_ranks, run_ranks

MODES = ("none", "full", "selective", "submodule", "sequential", "40%")


def _batches(rank: int, world_size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The tokens of all ranks, and this rank's batch."""
    ids = tokens(world_size)
    return ids, {"input_ids": ids[rank : rank + 1], "labels": ids[rank : rank + 1]}


def _one_family(rank: int, world_size: int, name: str, ep: int, modes: tuple[str, ...] = MODES) -> None:
    ids, mine = _batches(rank, world_size)
    assert_trains(partial(build, name), expected(name, ids), mine, *({"ac": mode, "ep": ep} for mode in modes))


@pytest.mark.few(1)
@pytest.mark.parametrize("modes", [("none", "selective", "40%"), MODES])
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_compute_what_one_does(name: str, modes: tuple[str, ...]) -> None:
    run_ranks(2, _one_family, name, 2, modes, timeout=120)


def test_experts_with_a_gate_and_without_an_activation() -> None:
    run_ranks(2, _one_family, "gpt_oss", 2, ("full",), timeout=120)


LAYOUTS = ({"ep": 2}, {"ep": 4}, {"ep": 2, "dp_replicate": 2})


@on_ranks(4)
def test_fewer_experts_than_ranks(rank: int, world_size: int) -> None:
    """One expert for each of two ranks, and two ranks for each expert: its weights are cut within."""
    ids, mine = _batches(rank, world_size)
    wanted = expected("mixtral", ids, num_local_experts=2)
    model = assert_trains(partial(build, "mixtral", num_local_experts=2), wanted, mine, {"ac": "full", "ep": 2})
    experts = model.model.layers[0].mlp.experts
    assert [tuple(p.to_local().shape) for p in experts.parameters()] == [(1, 48, 32), (1, 16, 48)]


@pytest.mark.long
@on_ranks(4, timeout=150)
def test_four_ranks_in_every_layout(rank: int, world_size: int) -> None:
    ids, mine = _batches(rank, world_size)
    for name in ("mixtral", "gpt_oss", "llama4"):
        wanted = expected(name, ids)
        whole = torch.stack([grad.norm() for key, grad in wanted.items() if key != "loss"]).norm()
        for options in LAYOUTS:
            model = assert_trains(partial(build, name), wanted, mine, {"ac": "selective", **options})
            assert abs(clip_grad_norm_(model, 1e9) - whole) <= 1e-5 * whole, options
            for module in model.modules():
                if type(module).__name__.removeprefix("FSDP").endswith("Experts"):
                    held = sum(p.to_local().numel() for p in module.parameters())
                    assert held * 4 == sum(p.numel() for p in module.parameters()) * options.get("dp_replicate", 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("modes", [("full", "30%"), ("none", "selective", "10%", "60%")])
@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
@on_ranks(2)
def test_a_rank_and_an_expert_without_any_token(rank: int, world_size: int, name: str, modes: tuple[str, ...]) -> None:
    """All tokens go to experts 0 and 1, which the first rank holds: the second gets none, and 2 and 3 none anywhere."""
    ids, sample = _batches(rank, world_size)

    def pull(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if type(module).__name__.endswith(("TopKRouter", "TopkRouter")):
                with torch.no_grad():
                    module.weight.zero_()  # equal probabilities: a tie that the lowest numbers win, here and in replay
        return model

    reference = pull(build(name))
    wanted = {n: torch.zeros_like(p) for n, p in reference.named_parameters()}
    wanted |= step(reference, input_ids=ids, labels=ids)
    # A rank without tokens runs fewer products than a budget's plan was made for; it must send what the others send.
    for mode in modes:
        model = parallelize(
            pull(build(name)), ac=mode, ep=2, device="cpu", sample_input=sample if "%" in mode else None
        )
        found = step(model, **sample)
        assert_near(mean_over_ranks(found["loss"]), wanted["loss"], 1e-6)
        assert_near(found | {"loss": wanted["loss"]}, wanted, where=mode, least=1e-3)
        down = next(grad for key, grad in found.items() if key.endswith("experts.down_proj"))
        assert sum(bool(expert.any()) for expert in down) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "ep"),
    [("llama4", 4), ("mixtral", 2), *((name, ep) for name in ("deepseek_v3", "gpt_oss") for ep in (2, 4))]
    + [("llama4", 2), ("mixtral", 4)],
)
@on_ranks(4, timeout=120)
def test_beside_tensor_parallel(rank: int, world_size: int, name: str, ep: int) -> None:
    ids = tokens(world_size)
    half = ids.chunk(2)[rank // 2]  # both ranks of a tp pair have the same
    way = {"ac": "selective", "tp": 2, "ep": ep}
    assert_trains(partial(build, name), expected(name, ids), {"input_ids": half, "labels": half}, way)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"compile": "aot_eager", "ac": "selective"},
    {"compile": "aot_eager", "ac": "full"},
    {"offload": "saved", "ac": "selective"},
    {"offload": "all", "ac": "none"},
    {"loss": "chunked", "ac": "full"},
    {"strategy": FSDP2(cpu_offload=True)},
    {"strategy": FSDP2(reshard_after_forward=False), "ac": "full"},
)


@pytest.mark.few(1)
@pytest.mark.parametrize("levers", [OPTIONS[1::2], OPTIONS[::2]])
@on_ranks(2, timeout=150)
def test_with_every_other_lever(rank: int, world_size: int, levers: tuple[dict[str, Any], ...]) -> None:
    ids, mine = _batches(rank, world_size)
    wanted = expected("mixtral", ids)
    for options in levers:
        assert_trains(partial(build, "mixtral"), wanted, mine, {"ep": 2, **options})


@on_ranks(2)
def test_what_cannot_be_split_is_refused_before_any_change(rank: int, world_size: int) -> None:
    model = build("mixtral")
    for arguments, message in (
        (dict(ep=4), "does not divide"),
        (dict(ep=0), "whole number of ranks"),
        (dict(ep=2, ac="50%"), "needs a sample_input|Pass sample_input"),
        (dict(ep=2, strategy="ddp"), "keeps them whole"),
        (dict(ep=ExpertParallel(2, plan={"nowhere": "routed"})), "matches no module"),
        (dict(ep=ExpertParallel(2, plan={"model.layers.*.mlp": "routed"})), "not fused"),
    ):
        with refused_unchanged(model, message):
            parallelize(model, device="cpu", **arguments)
    layers = build("mixtral").model.layers
    layers[1].mlp.experts.down_proj = layers[0].mlp.experts.down_proj
    routed = dict(layers=["*"], ep=ExpertParallel(2, plan={"*.mlp.experts": "routed"}))
    for other, arguments, message in (
        (layers, routed, "'down_proj' of '0.mlp.experts' is a parameter of another module, too"),
        (build("mixtral", num_local_experts=3), dict(ep=2), "divide the 3 experts"),
        (llama(), dict(ep=2), "no experts were found"),
    ):
        with pytest.raises(ValueError, match=message):
            parallelize(other, device="cpu", **arguments)
