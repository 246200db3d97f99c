"""The parts of what a rank holds in a step: by what it is, and by what would lower it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Part(StrEnum):
    """What bytes are, as reports print it. To tell another part apart, add it here and to one of the groups below."""

    PARAMETERS = "parameters"
    AVERAGED_WEIGHTS = "averaged weights"
    REMEMBERED_TABLES = "remembered tables"
    OPTIMIZER_STATE = "optimizer state"
    GRADIENTS = "gradients"
    GATHERED_LAYERS = "gathered layers"
    GATHERED_ROOT = "gathered root"
    REDUCE_BUFFERS = "reduce buffers"
    HELD_ACTIVATIONS = "held activations"
    RUNNING_LAYER = "running layer"
    OUTSIDE_OF_LAYERS = "outside of layers"
    KEPT_OUTPUT = "kept output"
    OPTIMIZER_STEP = "optimizer step"
    MICROBATCHES_IN_FLIGHT = "microbatches in flight"
    RECEIVE_BUFFERS = "receive buffers"
    SENT_TENSORS = "sent tensors"


STAYING = (Part.PARAMETERS, Part.AVERAGED_WEIGHTS, Part.REMEMBERED_TABLES, Part.OPTIMIZER_STATE)
"""There before the first step of a loop, or from then on; gradients apart."""
OF_LAYERS = (Part.HELD_ACTIVATIONS, Part.RUNNING_LAYER)
OF_HEAD = (Part.OUTSIDE_OF_LAYERS, Part.KEPT_OUTPUT)
STATE, GATHERED = "parameters and optimizer", "gathered layers and their reductions"
ACTIVATIONS, HEAD = "activations", "head"
GROUPS: Mapping[str, tuple[Part, ...]] = {
    STATE: (*STAYING, Part.GRADIENTS, Part.OPTIMIZER_STEP),
    GATHERED: (Part.GATHERED_LAYERS, Part.GATHERED_ROOT, Part.REDUCE_BUFFERS),
    ACTIVATIONS: OF_LAYERS,
    HEAD: OF_HEAD,
    "activations of microbatches in flight": (Part.MICROBATCHES_IN_FLIGHT,),
    "what stages send and receive": (Part.RECEIVE_BUFFERS, Part.SENT_TENSORS),
}
"""Parts by what would lower them."""


def largest_group(parts: Mapping[str, int]) -> str:
    """The key of `GROUPS` whose `parts`, bytes by name, are the most."""
    return max(GROUPS, key=lambda group: sum(parts.get(part, 0) for part in GROUPS[group]))
