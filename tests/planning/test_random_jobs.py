"""Random jobs of `tests.tools.benchmarks.random_jobs`, of which a plan, `fit` and a rank on fake tensors say the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from nemo_like import Job
from nemo_like.options import FSDP2, ContextParallel
from tests.tools.benchmarks.random_jobs import Drawn, answer, draw

pytest.importorskip("transformers")

SEEDS = (1007, 1043, 2017, 3294, 3319, 3420, 3659, 3853, 4279)
SHORT = (3420, 3659)
"""Those of the default run."""


def _named(seeds: Collection[int], short: Collection[int]) -> list[Any]:
    return [
        pytest.param(seed, id=f"{seed}: {draw(seed)[0].words}", marks=[] if seed in short else [pytest.mark.long])
        for seed in seeds
    ]


@pytest.mark.parametrize("seed", _named(SEEDS, SHORT))
def test_a_plan_and_fit_say_the_same(seed: int) -> None:
    drawn, _ = draw(seed)
    found = answer(drawn, rank=False)
    assert found.plan and found.fit and not found.problems, (drawn.words, found)


@pytest.mark.parametrize("seed", _named([seed for seed in SEEDS if seed != 2017], ()))  # which has most micro-batches
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
