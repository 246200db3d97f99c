"""Benchmarks: what each mode costs and saves on a model of yours. Timings are reports, never assertions.

``compare_modes(BenchOptions(...))`` gives a `Comparison`. Names are imported on request: the help of the command takes
the options alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_like._util.lazy import lazy_names

if TYPE_CHECKING:
    from nemo_like.bench.options import BenchOptions
    from nemo_like.bench.side_by_side import Comparison, compare_modes

_MODULES = {
    "BenchOptions": "nemo_like.bench.options",
    "Comparison": "nemo_like.bench.side_by_side",
    "compare_modes": "nemo_like.bench.side_by_side",
}

__all__ = sorted(_MODULES)
__getattr__ = lazy_names(__name__, _MODULES)
