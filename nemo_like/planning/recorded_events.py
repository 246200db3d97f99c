"""What was allocated and freed while a block, or the model around its blocks, ran on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Log = tuple[tuple[int, int], ...]
"""In order: the number of a storage, and its bytes; 0 bytes: it is freed."""


@dataclass(frozen=True)
class BlockEvents:
    """Of one block, under one choice. Its parameters and inputs are not among them."""

    forward: Log = ()
    """Its output is freed at the end, where autograd does not keep it."""
    backward: Log = ()
    outputs: tuple[int, ...] = ()
    """The storage of each tensor that it returns; 0: one that it was given."""
    output_grads: tuple[int, ...] = ()
    """The gradients that its backward is given, made at its beginning."""
    input_grads: tuple[int, ...] = ()
    """Gradients of its inputs, alive at its end."""
    param_grads: tuple[int, ...] = ()
    """Gradients of its parameters, alive at its end; 0: backward added to one that was there."""


@dataclass(frozen=True)
class ForwardCall:
    """Of a stand-in for a layer. Between `begin` and `end` its outputs are made, in order."""

    begin: int
    """Position in `OuterEvents.log`."""
    end: int
    inputs: tuple[int, ...]
    """The storages that it is given for itself."""


@dataclass(frozen=True)
class BackwardCall:
    """Of a stand-in for a layer. Between `begin` and `end` the gradients of its inputs are made."""

    layer: int
    """Position of its layer among all calls."""
    begin: int
    end: int
    grads: tuple[int, ...]
    """The gradients that it is given; 0: made outside."""


@dataclass(frozen=True)
class OuterEvents:
    """Of everything but the layers."""

    log: Log = ()
    calls: tuple[ForwardCall, ...] = ()
    forward_end: int = 0
    """Position in `log` at which the model has returned."""
    backs: tuple[BackwardCall, ...] = ()
    backward_end: int = 0
    """Position at which backward has ended: what is freed behind it is the output that the loop keeps."""
    param_grads: Mapping[str, int] = field(default_factory=dict)
    """By name; alive at the end."""
