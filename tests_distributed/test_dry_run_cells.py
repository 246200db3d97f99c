"""The planner against a rank on fake tensors: every family under every axis alone and in pairs, on up to 4,096 ranks.

The whole list is run by hand (`-m long`); a few of its cells run in CI.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from nemo_like.job import Job
from nemo_like.options import FSDP2, ContextParallel, ExpertParallel, PipelineParallel, StepSpec, TensorParallel
from nemo_like.planning import dry_run
from tests_distributed.peak_families import FAMILIES, WELL_KNOWN, WITH_EXPERTS, build, tokens

pytest.importorskip("transformers")
pytest.importorskip("scipy")

MOST = 0.005
"""Of the dry run's peak, how far the plan may be off."""
AXES = ("dp_replicate", "tp", "cp", "ep", "pp")
"""Of two ranks each; the other ranks shard."""
MODES = ("none", "full", "selective", "50%", "25%")
RANKS = (2, 4, 8, 16, 64, 256, 1024, 4096)
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zbv")
EXPERTS = {*WITH_EXPERTS, "mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"}


class Cell(NamedTuple):
    """A family and a job of one of its ranks."""

    family: str
    ranks: int
    axes: tuple[str, ...]
    ac: str
    words: tuple[str, ...]
    """What else is asked; see `job_of`."""

    @property
    def name(self) -> str:
        return "-".join([self.family, str(self.ranks), *self.axes, self.ac, *self.words])

    @property
    def rank(self) -> int:
        """The first one of the pipeline's last stage, or of all."""
        return self.ranks // 2 if "last stage" in self.words else 0

    @property
    def job(self) -> Job:
        """What the words mean."""
        said, asked = set(self.words), dict[str, Any]()
        if "dp_replicate" in self.axes:
            asked["dp_replicate"] = 2
        if "tp" in self.axes:
            asked["tp"] = TensorParallel(2, sequence_parallel="sequence parallel" in said)
        if "cp" in self.axes:
            asked["cp"] = ContextParallel(2, "ulysses" if "ulysses" in said else "all_gather")
        if "ep" in self.axes:
            asked["ep"] = ExpertParallel(2, imbalance=2.0)  # where the models of `build` send all rows
        if "pp" in self.axes:
            asked["pp"] = PipelineParallel(2, next(word for word in SCHEDULES if word in said), 4)
        if reshard := said & {"reshard", "no reshard"}:
            asked["strategy"] = FSDP2(reshard == {"reshard"})
        if "bf16" in said:
            asked["precision"] = "bf16"
        if "chunked" in said:
            asked["loss"] = "chunked"
        step = StepSpec(
            2 if said & {"sync last", "sync every"} else 1, "every" if "sync every" in said else "last",
            keeps_output="drop output" not in said, zero_grad="zero" if "zero" in said else "free",
        )  # fmt: skip
        return Job.of(ac=self.ac, world_size=self.ranks, step=step, **asked)


def cells() -> Iterator[Cell]:
    """Every family with no axis, one, and two; the rest is drawn, the well-known families twice."""
    draw = random.Random(28)
    combinations = [axes for count in range(3) for axes in itertools.combinations(AXES, count)]
    for family in (*FAMILIES, *WELL_KNOWN, *WELL_KNOWN):
        for axes in combinations:
            if "ep" in axes and family not in EXPERTS:
                continue
            yield _drawn(draw, family, axes)


def _drawn(draw: random.Random, family: str, axes: tuple[str, ...]) -> Cell:
    words, ac = [], draw.choice(MODES)
    ranks = draw.choice([each for each in RANKS if each >= 2 ** max(1, len(axes))])
    if "tp" in axes and "pp" not in axes and draw.random() < 0.5:
        words.append("sequence parallel")
    if "cp" in axes and "tp" not in axes and draw.random() < 0.5:
        words.append("ulysses")
    if "pp" in axes:
        words += [draw.choice(SCHEDULES), draw.choice(["first stage", "last stage"])]
    else:
        words += draw.choice([[], [], ["sync last"], ["sync every"]])
        words += draw.choice([[], ["drop output"]])
    words += draw.choice([[], ["reshard"], ["no reshard"]])
    words += draw.choice([[], ["bf16"]])
    words += draw.choice([[], ["chunked"]])
    words += draw.choice([[], [], ["zero"]])
    return Cell(family, ranks, axes, ac, tuple(words))


def difference(cell: Cell) -> tuple[int, int | None, str]:
    """The dry run's bytes, the plan's, and where the peak is."""
    ids = tokens(2)
    found = dry_run(build(cell.family), cell.job, {"input_ids": ids, "labels": ids}, rank=cell.rank)
    return found.peak_bytes, found.against, found.at
