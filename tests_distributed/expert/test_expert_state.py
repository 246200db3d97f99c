"""Weights of split experts: filled from meta, saved, resumed with experts split otherwise, exported."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, LoadPlan
from torch.distributed.tensor import DTensor

from nemo_like import parallelize
from nemo_like.distributed import (
    clip_grad_norm_,
    get_model_state,
    get_optimizer_state,
    materialize,
    set_model_state,
    set_optimizer_state,
)
from tests.checks import assert_bitwise, assert_near, labelled, update
from tests.models.expert_families import build, tokens
from tests_distributed.spawn import run_ranks

FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss")


def _filled(rank: int, world_size: int, folder: str, ep: int) -> None:
    for name in FAMILIES:
        bare = build(name).state_dict()
        for source in ({"checkpoint": f"{folder}/{name}"}, {"state_dict": bare}):
            model = parallelize(build(name, "meta"), ac="full", ep=ep, device="cpu")
            materialize(model, **source)
            assert_bitwise(get_model_state(model, full=True), {} if rank else bare, (name, list(source)))


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_from_meta(tmp_path: Path, ranks: int, ep: int) -> None:
    for name in FAMILIES:
        build(name).save_pretrained(tmp_path / name)
    run_ranks(ranks, _filled, str(tmp_path), ep, timeout=120)


def _read(rank: int, world_size: int, folder: str, options: dict[str, int]) -> tuple[int, int]:
    """Values that this rank read of the files, and values that it holds."""
    read: list[int] = []
    whole = HuggingFaceStorageReader.read_data

    def watched(reader: HuggingFaceStorageReader, plan: LoadPlan, planner: Any) -> Any:
        read.extend(math.prod(item.lengths) for item in plan.items)
        return whole(reader, plan, planner)

    HuggingFaceStorageReader.read_data = watched  # type: ignore[method-assign]
    model = parallelize(build("mixtral", "meta"), device="cpu", **options)
    materialize(model, checkpoint=f"{folder}/mixtral")
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(read), sum(part.numel() for part in held)


@pytest.mark.parametrize("options", [{"ep": 2}, {"tp": 2}])
def test_each_rank_reads_its_own_part_only(tmp_path: Path, options: dict[str, int]) -> None:
    build("mixtral").save_pretrained(tmp_path / "mixtral")
    for read, held in run_ranks(2, _read, str(tmp_path), options):
        assert read == held


def _initialised(rank: int, world_size: int) -> dict[str, Tensor]:
    model = parallelize(build("mixtral", "meta"), ep=2 if world_size > 1 else 1, device="cpu")
    materialize(model, seed=3)
    return get_model_state(model, full=True)


def test_what_is_drawn_does_not_depend_on_the_ranks() -> None:
    assert_bitwise(run_ranks(2, _initialised)[0], run_ranks(1, _initialised)[0])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, rank: int, world_size: int) -> None:
    rows = 4 // world_size
    model(**labelled(tokens(4, seed=seed)[rows * rank : rows * (rank + 1)])).loss.backward()
    clip_grad_norm_(model, 1.0)
    update(optimizer)


def _train(rank: int, world_size: int, ep: int, folder: str, resume: bool, steps: tuple[int, ...]) -> dict[str, Tensor]:
    model = parallelize(build("mixtral"), ac="selective", ep=ep, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if resume:
        _step(model, optimizer, 0, rank, world_size)  # states to load into
        state: dict[str, Any] = {"model": get_model_state(model), "optimizer": get_optimizer_state(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state(model, state["model"])
        set_optimizer_state(model, optimizer, state["optimizer"])
    for seed in steps:
        _step(model, optimizer, seed, rank, world_size)
    if not resume:
        dcp.save({"model": get_model_state(model), "optimizer": get_optimizer_state(model, optimizer)}, checkpoint_id=folder)
    return get_model_state(model, full=True)


@pytest.mark.few(1)
@pytest.mark.parametrize(("before", "after"), [((2, 2), (2, 1)), ((2, 1), (4, 4)), ((2, 2), (4, 2))])
def test_resumed_with_experts_split_otherwise(tmp_path: Path, before: tuple[int, int], after: tuple[int, int]) -> None:
    """(ranks, ep) before and after."""
    run_ranks(before[0], _train, before[1], str(tmp_path), False, (1, 2), timeout=90)
    resumed = run_ranks(after[0], _train, after[1], str(tmp_path), True, (3,), timeout=90)[0]
    assert_near(resumed, run_ranks(1, _train, 1, str(tmp_path / "whole"), False, (1, 2, 3), timeout=90)[0], 1e-4)
