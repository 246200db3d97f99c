"""Benchmarks: what each mode costs and saves on a model of yours. Timings are reports, never assertions.

Each suite is a `Suite` object in a module of this package; ``SUITES[name].measure(BenchOptions(...))`` gives a `Table`.
"""

from nemo_like.bench.loss import LOSS
from nemo_like.bench.memory import MEMORY
from nemo_like.bench.offload import OFFLOAD
from nemo_like.bench.suite import BenchOptions, Measured, Suite
from nemo_like.bench.table import Column, Table

SUITES = {"memory": MEMORY, "offload": OFFLOAD, "loss": LOSS}
"""The suites of `nemo-like bench`, by name."""

__all__ = ["SUITES", "BenchOptions", "Column", "Measured", "Suite", "Table"]
