"""`nemo-like bench` on two ranks: every mode is sharded the same way and gives the gradients of none."""

from __future__ import annotations

import pytest

from nemo_like.bench import BenchOptions, compare_modes
from tests_distributed.spawn import run_ranks


def _bench(rank: int, world_size: int, strategy: str) -> list[tuple[str, str]]:
    modes = ("sequential", "torch: checkpoint per layer")
    options = BenchOptions(
        batch_size=1, seq_len=16, device="cpu", strategy=strategy, modes=modes, repeats=1, warmup=0, budgets=()
    )
    results = compare_modes(options)
    assert results.about["ranks"] == world_size
    return [(row["mode"], row["gradients"]) for row in results.rows]


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_two_ranks(strategy):
    names = ["none", "sequential", "x torch: checkpoint per layer"]
    assert run_ranks(2, _bench, strategy, timeout=120) == [[(name, "bitwise") for name in names]] * 2
