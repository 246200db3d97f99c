"""Random training loops under FSDP2 on two ranks: what no checkpointing trains, to the bit, or an error."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor

from nemo_like import parallelize
from tests.models.loops import ACTIONS, KINDS, LAYERS, Action, LoopModel, Outcome, differences, run_loop
from tests_distributed.spawn import run_ranks

MODES = ("full", "selective", "submodule", "sequential")
# FSDP2 itself has no say about a layer whose parameters are exchanged or frozen after sharding.
NOT_SHARDED = {"new_linear", "freeze", "bias_in_place"}


def _drawn(seed: int) -> tuple[tuple[str, ...], list[Action], str]:
    draw = random.Random(seed)
    kinds = tuple(draw.choice(KINDS) for _ in range(LAYERS))
    known = [what for what in ACTIONS if what not in NOT_SHARDED]
    actions = [
        Action(draw.choice(known), draw.randrange(LAYERS), draw.randrange(4)) for _ in range(draw.randrange(3, 15))
    ]
    return kinds, actions, draw.choice(MODES)


def _outcome(kinds: tuple[str, ...], actions: list[Action], mode: str) -> Outcome:
    torch.manual_seed(1)
    outcome = run_loop(parallelize(LoopModel(kinds), ac=mode), actions)
    plain = [[t.to_local() if isinstance(t, DTensor) else t for t in tensors] for tensors in outcome.seen]
    state = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in outcome.state.items()}
    return Outcome(plain, state, outcome.error)


def _loops(rank: int, world_size: int, seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        kinds, actions, mode = _drawn(seed)
        expected, actual = _outcome(kinds, actions, "none"), _outcome(kinds, actions, mode)
        found = differences(expected, actual)
        assert found == [], (seed, kinds, actions, mode, found, actual.error)
        if expected.error is not None:
            assert actual.error is not None, (seed, kinds, actions, mode, expected.error)
        counts["same" if actual.error is None else "error"] += 1
    return counts


@pytest.mark.long
def test_random_loops_on_two_ranks() -> None:
    counts = run_ranks(2, _loops, range(60), timeout=240)
    assert counts[0] == counts[1] and counts[0]["same"] >= 40, counts
