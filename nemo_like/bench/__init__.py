"""Benchmarks: what each mode costs and saves on a model of yours. Timings are reports, never assertions.

Each suite is a `Suite` object in a module of this package; ``SUITES[name].measure(BenchOptions(...))`` gives a `Table`.
"""

from nemo_like.bench.loss import LOSS
from nemo_like.bench.side_by_side import MEMORY, OFFLOAD
from nemo_like.bench.suite import BenchOptions, Column, Measured, Suite, Table

SUITES = {"memory": MEMORY, "offload": OFFLOAD, "loss": LOSS}
"""The suites of `nemo-like bench`, by name."""

__all__ = ["SUITES", "BenchOptions", "Column", "Measured", "Suite", "Table"]
