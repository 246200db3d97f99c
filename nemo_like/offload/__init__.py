"""Host placement: tensors that autograd or an engine keeps for backward wait in CPU memory. Needs torch alone."""

from nemo_like.offload.mover import OffloadStats
from nemo_like.offload.offloader import (
    HostPolicy,
    Offloader,
    Offloading,
    apply_offloading,
    offload_activations,
    offloader_of,
    place_decisions,
    placed_on_host,
)

__all__ = [
    "HostPolicy",
    "OffloadStats",
    "Offloader",
    "Offloading",
    "apply_offloading",
    "offload_activations",
    "offloader_of",
    "place_decisions",
    "placed_on_host",
]
