"""Suite ``planning``: how long a plan takes, from the traced block to the table of decisions."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

from nemo_like.job import Job
from nemo_like.models import resolve_model
from nemo_like.options import MemoryBudget
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from tests.planning.queries import plan_of
from tests.tools.benchmarks.scale import shapes_of
from tests.tools.benchmarks.suite import Column, Measured, Suite

SHAPES = (("llama3-8b", 64), ("mixtral-8x7b", 64), ("llama3-70b", 512), ("llama3-405b", 16_384))
"""(preset, ranks)."""

TOKENS = 8192


def _run(options: Namespace) -> Measured:
    """Plan each shape once (or, for another preset in `options.model`, that one on 8 ranks)."""
    about = {"seq_len": TOKENS, "batch_size": 1, "gpu": "h100-80gb"}
    rows = [measure(*shape) for shape in shapes_of(options, SHAPES)]
    return Measured("Time to plan", rows, about)


def measure(name: str, ranks: int, tokens: int = TOKENS) -> dict[str, Any]:
    """One row: seconds to build, to trace, to choose (every block's frontier) and to plan for half of the activations."""
    start = time.perf_counter()
    source = resolve_model(name)
    model = source.build("meta")
    built = time.perf_counter()
    job = Job.of(world_size=ranks, precision="bf16", gpu=resolve_device("h100-80gb"))
    query = PlanQuery.from_model(model, source.sample_input(1, tokens), job)
    traced = time.perf_counter()
    (stage,) = query.stages
    kinds = len(stage.part.problems)
    for kind in range(kinds):
        stage.part.problems[kind].frontier(skip=stage.skip, host=stage.host)
    chosen = time.perf_counter()
    plan = plan_of(query, MemoryBudget(fraction=0.5))
    end = time.perf_counter()
    return {
        "model": name,
        "ranks": ranks,
        "layers": len(plan.layers),
        "kinds": kinds,
        "build_s": built - start,
        "trace_s": traced - built,
        "choose_s": chosen - traced,
        "plan_s": end - chosen,
        "total_s": end - start,
    }


PLANNING = Suite(
    help="time to plan 8B, 70B, 405B and mixture-of-experts shapes for 8192 tokens on H100s, on meta",
    columns=(
        Column("model", "model"),
        Column("ranks", "ranks", "{:,}".format),
        Column("layers", "layers"),
        Column("kinds", "distinct blocks"),
        Column("build_s", "build on meta s", "{:.2f}".format),
        Column("trace_s", "trace s", "{:.2f}".format),
        Column("choose_s", "choose s", "{:.2f}".format),
        Column("plan_s", "plan within 50% s", "{:.2f}".format),
        Column("total_s", "in all s", "{:.2f}".format),
    ),
    run=_run,
)
