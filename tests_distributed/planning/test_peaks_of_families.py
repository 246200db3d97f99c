"""What is predicted for families that the planner was not written with, under every axis alone and in pairs.

The whole list is run by hand (`-m long`) and stands in docs/evidence/peaks.md; a few of its cells run in CI.
"""

from __future__ import annotations

import pytest

from tests_distributed.planning.peak_families import FAMILIES
from tests_distributed.planning.peaks import ALONE, PAIRS, Cell, cells, run_cells
from tests_distributed.spawn import run_ranks

pytest.importorskip("transformers")

FEW = (
    Cell("olmo3", {"tp": 2}, "none"),  # splits the input of a linear
    Cell("flex_olmo", {"dp_shard": 2, "ep": 2}, "selective"),
    Cell("deepseek_v2", {"dp_shard": 2, "ep": 2}, "full"),  # rows that come back by index
    Cell("cohere2", {"dp_replicate": 2, "tp": 2}, "selective"),
    Cell("smollm3", {"dp_replicate": 2, "pp": 2}, "full"),
    Cell("flex_olmo", {"dp_shard": 2, "ep": 2, "pp": 2}, "full"),  # gradients of split experts that are added to others
    Cell("helium", {"tp": 2, "pp": 2}, "plan", "gpipe"),
    Cell("qwen2_moe", {"tp": 2, "pp": 2}, "selective"),  # splits experts inside
    Cell("solar_open", {"dp_shard": 4, "ep": 2}, "selective"),  # gathers experts in replay
    Cell("granitemoe", {"tp": 2, "pp": 2}, "selective", "zbv"),  # adds gradients to one that came from the next stage
)


def _assert_close(wanted: list[Cell]) -> None:
    found = run_ranks(wanted[0].ranks, run_cells, wanted, timeout=180 * len(wanted))[0]
    off = [(row.cell, row.at, f"{row.error:+.2%}") for row in found if not row.refused and abs(row.error) > 0.01]
    assert not off, off
    assert all(row.measured or row.refused for row in found)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_peaks_of_a_few(ranks: int) -> None:
    _assert_close([cell for cell in FEW if cell.ranks == ranks])


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("family", FAMILIES)
def test_peaks_of_all(family: str) -> None:
    for axes in (ALONE, PAIRS):
        _assert_close(list(cells([family], axes)))
