"""Benchmarks: what each mode costs and saves on a model of yours. Timings are reports, never assertions.

Each suite is a `Suite` object in a module of this package; ``SUITES[name].measure(BenchOptions(...))`` gives a `Table`.
Names are imported when they are asked for: the help of the command takes the options alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_like._util.lazy import lazy_names

if TYPE_CHECKING:
    from nemo_like.bench.options import BenchOptions
    from nemo_like.bench.side_by_side import SUITES
    from nemo_like.bench.suite import Column, Measured, Suite, Table

_MODULES = {
    "SUITES": "nemo_like.bench.side_by_side",
    "BenchOptions": "nemo_like.bench.options",
    "Column": "nemo_like.bench.suite",
    "Measured": "nemo_like.bench.suite",
    "Suite": "nemo_like.bench.suite",
    "Table": "nemo_like.bench.suite",
}

__all__ = sorted(_MODULES)
__getattr__ = lazy_names(__name__, _MODULES)
