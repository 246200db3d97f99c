"""Benchmarks: the cost and the saving of each mode on a model of yours. Timings are reports, never assertions.

``compare_modes(BenchOptions(...))`` gives a `Comparison`. Names are imported on request: the help of the command takes
the options alone.
"""

from nemo_like._util.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
