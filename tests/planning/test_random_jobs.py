"""Random jobs of `tests.tools.benchmarks.random_jobs`, of which a plan, `fit` and a rank on fake tensors say the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from nemo_like import Job
from nemo_like.options import FSDP2, ContextParallel
from tests.tools.benchmarks.random_jobs import Drawn, answer, draw

pytest.importorskip("transformers")

SEEDS = {
    1007: "tp, zbv with its backward twice, boundary offloading",
    1043: "a peak that only full checkpointing stays within",
    2017: "tp, replicas, stages of equal memory",
    3294: "ulysses, accumulation, parameters resharded over two ranks",
    3319: "tp with parts of sequences and a split loss, replicas",
    3325: "zbv, stages of equal memory",
    3420: "ep, accumulation, an average of weights",
    3659: "ep, interleaved stages resharded over two ranks",
    3853: "ep, replicas, a peak",
}
LONG = (1007, 1043, 2017, 3294, 3319, 3325, 3853)
"""Those that take longest."""


def _named(seeds: Collection[int], long: Collection[int]) -> list[Any]:
    return [
        pytest.param(seed, id=f"{seed}: {SEEDS[seed]}", marks=[pytest.mark.long] if seed in long else [])
        for seed in seeds
    ]


@pytest.mark.parametrize("seed", _named(SEEDS, LONG))
def test_a_plan_and_fit_say_the_same(seed: int) -> None:
    drawn, _ = draw(seed)
    found = answer(drawn, rank=False)
    assert found.plan and found.fit and not found.problems, (drawn.words, found)


RANKS = [seed for seed in SEEDS if seed not in (1007, 2017)]
"""All but the one with an offload, which no fake rank runs, and the one with most micro-batches, which takes long."""


@pytest.mark.parametrize("seed", _named(RANKS, RANKS))
def test_a_fake_rank_says_the_same(seed: int) -> None:
    drawn, _ = draw(seed)
    found = answer(drawn)
    assert found.rank is not None and not found.problems, (drawn.words, found)


def test_ulysses_names_the_heads_that_tp_leaves() -> None:
    job = Job.of(ac="none", tp=2, cp=ContextParallel(4, "ulysses"), world_size=8, gpu="cpu")
    found = answer(Drawn("llama", job, 1, 32), rank=False)
    assert "this attention has 2 heads, 1 of keys on each rank of tp" in found.refused["plan"]


@pytest.mark.parametrize(("ranks", "divisors"), [(3, "no number between does"), (8, "2, 4")])
def test_a_job_reshards_over_a_divisor_of_its_shards(ranks: int, divisors: str) -> None:
    with pytest.raises(ValueError, match=rf"shard axis of {ranks} ranks \({divisors}\)"):
        Job.of(FSDP2(reshard_after_forward=3 if ranks == 8 else 2), world_size=ranks)
