"""Seconds of the CPU thread that launches the kernels of a layer: where the GPU is faster, it waits.

The rates are CPU time of that thread, measured by `tests.tools.benchmarks.host` on layers so small that their kernels take
next to nothing (AMD EPYC, 2 cores, torch 2.13.0+cpu; docs/evidence/overhead.md), and halved: the host of a GPU node runs one
thread about twice as fast. The half is an assumption.
"""

from __future__ import annotations

_FASTER = 2.0
"""Times the host of a GPU node is faster than the measuring machine: assumed."""


def _rate(forward: float, backward: float) -> float:
    """Microseconds as measured, of a backward with its recomputation → seconds of a GPU node's host for both."""
    return (forward + backward) / _FASTER * 1e-6


# For each operator of a layer's forward, views included, by what runs around it.
_ALONE = _rate(4.6, 5.8)
_FULL = _rate(9.0, 17.1)
_BY_OPERATOR = _rate(17.3, 26.7)
_UNIT = _rate(1_710, 2_010)
"""FSDP2's hooks, copies and collectives of a layer, beside its operators."""
_PRODUCT = _rate(380, 785)
"""A linear that tensor parallelism splits: DTensor's dispatch and its share of the collectives."""
_SEQUENCE_PRODUCT = _rate(654, 1_104)
"""The same with sequence parallelism, which gathers and scatters instead of one sum."""


def host_seconds(
    operators: int, label: str, *, units: int, split_products: int, sequence_parallel: bool = False
) -> float:
    """Return the seconds of the host in forward and backward of one layer call.

    Args:
        operators: that it launches one by one: of the forward, views included; 0: the layer is compiled.
        label: of its choice: ``none`` and ``full`` run without a look at each operator.
        units: FSDP2 units in it. split_products: linears that tensor parallelism splits.
        sequence_parallel: these gather and scatter sequences.
    """
    around = {"none": _ALONE, "full": _FULL}.get(label, _BY_OPERATOR)
    product = _SEQUENCE_PRODUCT if sequence_parallel else _PRODUCT
    return operators * around + units * _UNIT + split_products * product
