"""Benchmarks: what each mode costs and saves on a given model. Timings are reports, never assertions.

A suite is a module of this package with ``HELP: str``, ``READS: tuple[str, ...]`` (the fields of `BenchOptions` that it
reads, and ``plot`` where its results can be drawn) and ``run(options: BenchOptions) -> Results``; results have
``table() -> str``, ``to_json() -> str`` and ``plot(path)``. `nemo_like.bench.bench_report.Table` is a ready one.
"""

from nemo_like.bench.bench_report import Results, Table
from nemo_like.bench.suite_options import BenchOptions

SUITES = ("memory", "overhead", "offload", "planning", "check", "scale", "verify", "loss", "published")
"""The names of the suites; each is the module of that name in this package."""

__all__ = ["SUITES", "BenchOptions", "Results", "Table"]
