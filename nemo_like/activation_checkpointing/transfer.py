"""The way of a saved tensor to CPU memory and back: a protocol, and the simplest back end that fulfils it."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class WaitingTensor(Protocol):
    """One tensor that waits in CPU memory. It owns its data."""

    def get(self) -> Tensor:
        """The tensor on its own device again, with its sizes and strides; may be called more than once."""


class Transfer(Protocol):
    """Moves tensors to the host and back. `nemo_like.offload` has one that overlaps copies with computing."""

    def to_host(self, tensor: Tensor) -> WaitingTensor:
        """Start the copy. The caller may drop the tensor at once."""

    # Optional: `before_change(handle)`, called before the source of a copy is changed in place: whatever the caller does
    # next on its stream must come after the copy has read its source.


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    host: Tensor
    device: torch.device

    def get(self) -> Tensor:
        if self.device.type == "cpu":
            return self.host.clone(memory_format=torch.preserve_format)
        return self.host.to(self.device)


class SynchronousTransfer:
    """Copies at once and waits: right everywhere, overlapped nowhere. The engine's default.

    >>> SynchronousTransfer().to_host(torch.ones(2)).get()
    tensor([1., 1.])
    """

    def to_host(self, tensor: Tensor) -> WaitingTensor:
        """Copy `tensor` to CPU memory (a copy of its own even where it is there already)."""
        return _Copy(tensor.detach().to("cpu", copy=True), tensor.device)
