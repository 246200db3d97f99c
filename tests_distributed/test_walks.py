"""The walks of options that take ranks are as docs/reference/how-it-works/design.md says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.decoders import batch, build
from tests.walks import check, walk
from tests_distributed.spawn import run_ranks


def _walk(rank: int, world_size: int, option: str) -> Any:
    ids = batch(4)
    return walk(build("llama"), option, ac="none", device="cpu", sample_input={"input_ids": ids, "labels": ids})


@pytest.mark.parametrize("option", ["cp=2", "pp=2"])
def test_the_walk_of_an_axis_is_as_the_design_says(option: str) -> None:
    check(run_ranks(2, _walk, option)[0], option)
