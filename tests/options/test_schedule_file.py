"""Schedules of pipelines in files: what they say, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.distributed.pipeline.schedules import actions_of, stages_of
from nemo_like.options import PipelineParallel


def _file(folder: Path, text: str) -> str:
    path = folder / "schedule.csv"
    path.write_text(text)
    return str(path)


def test_a_file_says_stages_microbatches_and_order(tmp_path: Path) -> None:
    pp = PipelineParallel(
        2, _file(tmp_path, "0F0,0F1,,3F0,3B0,3F1,3I1,3W1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2I1,1I1,2W1,1W1\n")
    )
    assert (pp.stages, pp.microbatches, pp.stages_per_rank) == (4, 2, 2)
    assert [stages_of(pp, rank) for rank in (0, 1)] == [[0, 3], [1, 2]]
    assert pp.facts.splits_backward
    assert " ".join(map(str, actions_of(pp)[0])) == "0F0 0F1 3F0 3B0 3F1 3I1 3W1 0B0 0B1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n", "pp is 2, and .* has 1 lines"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "line 1: '0SEND_F0' is not an action"),
        ("0F0,0B0\n1F0,1I0\n", "stage 1 must run micro-batch 0 forward"),
        ("0F0,0B0,0B0\n1F0,1B0\n", "1 action.s. are there twice"),
        ("0F0,1F0,0B0\n1B0\n", "stage 1 is on ranks 0 and 1"),
        ("0B0,0F0\n1F0,1B0\n", "standstill: 0B0, 1F0 wait for each other"),
        ("0F0,0B0\n\n", "a line without an action"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_where(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineParallel(2, _file(tmp_path, text))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"no-such\.csv', which can't be read"):
        PipelineParallel(2, "no-such.csv")


def test_other_numbers_than_the_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"microbatches is 4, and the file .* has 1; leave it out"):
        PipelineParallel(2, _file(tmp_path, "0F0,0B0\n1F0,1B0\n"), microbatches=4)
