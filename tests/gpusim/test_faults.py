"""The simulated device finds faults that are put into the offloading code, and none where there is none."""

from __future__ import annotations

import pytest

from tests.gpusim import on_device
from tests.gpusim.faults import FAULTS, all_right, how_it_shows


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    assert on_device(how_it_shows, name) in FAULTS[name].shows_as.split(" or ")


@pytest.mark.parametrize("seeds", [[None, 0], pytest.param([1, 2, 3, 4], marks=pytest.mark.long)])
def test_without_a_fault_all_is_equal_and_nothing_races(seeds: list[int | None]) -> None:
    assert on_device(all_right, seeds) == []
