"""Families under every axis alone and in pairs, on up to 4,096 ranks: the planner against a rank on fake tensors.

    python -m tests_distributed.planning.dry_run_cells FILE [PART PARTS]

runs the cells that FILE has no line of yet (of every PARTS of them, number PART), and appends a line of JSON for each.
"""

import itertools
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nemo_like.fake_rank import DryRun, dry_run
from nemo_like.job import Job
from nemo_like.options import FSDP2, ContextParallel, ExpertParallel, PipelineParallel, StepSpec, TensorParallel
from tests.checks import labelled
from tests_distributed.planning.peak_families import FAMILIES, WELL_KNOWN, WITH_EXPERTS, build, tokens

MOST = 0.005
"""Of the dry run's peak, how far the plan may be off."""
AXES = ("dp_replicate", "tp", "cp", "ep", "pp")
"""Of two ranks each; the other ranks shard."""
MODES = ("none", "full", "selective", "50%", "25%")
RANKS = (2, 4, 8, 16, 64, 256, 1024, 4096)
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zbv")
EXPERTS = {*WITH_EXPERTS, "mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"}
NO_TENSOR_PLAN = {"persimmon", "biogpt"}
NO_SEQUENCE_PARALLEL = {"hunyuan_v1_dense", "gpt_oss"}
"""Their plans cut nothing in the layers."""


class Cell(NamedTuple):
    """A family and a job of one of its ranks."""

    family: str
    ranks: int
    axes: tuple[str, ...]
    ac: str
    words: tuple[str, ...]
    """What else is asked."""

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
            cell = _drawn(draw, family, axes)
            if "tp" in axes and family in NO_TENSOR_PLAN:
                continue
            if family in NO_SEQUENCE_PARALLEL:
                cell = cell._replace(words=tuple(word for word in cell.words if word != "sequence parallel"))
            if "zbv" in cell.words:  # whose backward is cut in two
                cell = cell._replace(words=tuple(word for word in cell.words if word != "reshard"))
            if family == "gpt_oss":  # attention sinks
                cell = cell._replace(words=tuple(word for word in cell.words if word != "ulysses"))
            yield cell


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


OPTIONAL = (*AXES, "sequence parallel", "ulysses", "drop output", "reshard", "bf16", "chunked", "zero")
"""Words that a cell has or has not."""


def covering(every: Iterable[Cell], first: Iterable[Cell] = ()) -> list[Cell]:
    """Choose cells, `first` among them, that have each pair of options that `every` cell together has, and each family and
    each number of ranks with every axis and mode."""
    having = {cell: _pairs(cell) for cell in every}
    chosen = list(first)
    missing = set().union(*having.values()).difference(*map(_pairs, chosen))
    while missing:
        best = max(having, key=lambda cell: len(having[cell] & missing))
        chosen.append(best)
        missing -= having[best]
    return chosen


def _pairs(cell: Cell) -> set[tuple[Any, Any]]:
    said = {*cell.axes, cell.ac, *cell.words}
    said |= {f"without {word}" for word in OPTIONAL if word not in said}
    of_job = itertools.combinations(sorted(said), 2)
    return {*of_job, *itertools.product((cell.family, cell.ranks), (*cell.axes, cell.ac))}


def run(cell: Cell) -> DryRun:
    """Run the cell's job on its rank."""
    return dry_run(build(cell.family), cell.job, labelled(tokens(2)), rank=cell.rank)


def main(path: Path, part: int = 0, parts: int = 1) -> None:
    """Run what `path` does not have, in an order that mixes families."""
    every = list(cells())
    random.Random(1).shuffle(every)
    known = {json.loads(line)["name"] for line in path.read_text().splitlines()} if path.exists() else set()
    for cell in every[part::parts]:
        if cell.name in known:
            continue
        row, start = {"name": cell.name}, time.perf_counter()
        try:
            found = run(cell)
            row |= {"dry_run": found.peak_bytes, "plan": found.against, "at": found.at}
        except (ValueError, NotImplementedError) as error:
            row |= {"refused": str(error)}
        row |= {"seconds": time.perf_counter() - start}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
