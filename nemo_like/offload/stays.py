"""Saved tensors that stay on the device, and why; counters of those that stayed and those that moved.

Weights are on the device anyway, so moving them costs bandwidth and frees nothing; with FSDP2 the unsharded weights of
a whole model would go to the host. They are known by their kind (a `Parameter`, a view of one, a low-precision copy
that autocast made of one), and by their storage where the model is known.
"""

import weakref
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from nemo_like._util.words import a_or_an
from nemo_like.torch_compat import base_of

PARAMETER = "a parameter, or a view of one"
LAST_LAYER = "where backward starts (the last layer, or layers left out, and the code after them)"
PART = "less than half of its storage"


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is made of other tensors and tells how (PyTorch's traceable-subclass protocol)."""
    return hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


def take_apart(tensor: Any) -> tuple[dict[str, Any], Any]:
    """A wrapper subclass's inner values by attribute (tensors, and for a DTensor its mesh), and its context."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages behind `tensor`: its own, or those of a wrapper subclass's inner tensors, at any depth."""
    if is_wrapper_subclass(tensor):
        inner = [value for value in take_apart(tensor)[0].values() if isinstance(value, torch.Tensor)]
        return [storage for value in inner for storage in storages_of(value)]
    real = tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_mkldnn
    return [tensor.untyped_storage()] if real else []


class KnownStorages:
    """Storages that never move, remembered without keeping them alive."""

    def __init__(self) -> None:
        self.storages: weakref.WeakKeyDictionary[torch.UntypedStorage, str] = weakref.WeakKeyDictionary()
        """With the reason."""
        self._shapes: dict[tuple[int, ...], set[torch.dtype]] = {}

    def learn(self, module: nn.Module) -> None:
        """Remember the parameters and buffers that `module` has now (FSDP2 puts others in place around a forward)."""
        for parameter in module.parameters():
            self._shapes.setdefault(tuple(sorted(parameter.shape)), set()).add(parameter.dtype)
        for reason, tensors in ((PARAMETER, module.parameters()), ("a buffer of the model", module.buffers())):
            self.storages.update((storage, reason) for tensor in tensors for storage in storages_of(tensor))

    def has_weight_like(self, tensor: torch.Tensor) -> bool:
        """Return whether a known parameter has this shape, transposed or not, in another dtype; for any matrix if none
        is known."""
        others = self._shapes.get(tuple(sorted(tensor.shape)), set()) - {tensor.dtype}
        return bool(others) if self._shapes else tensor.dim() == 2


def spans_half(tensor: torch.Tensor) -> bool:
    """Return whether a plain strided tensor reaches over half of its storage or more, from its first byte to its last.

    Below that it stays: its storage would go as a whole, and may be alive for other reasons (a batch of a data set).

    >>> table = torch.zeros(8, 4)
    >>> spans_half(table[:4]), spans_half(table[:3]), spans_half(table[:, :1])
    (True, False, True)
    """
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool((int(last) + 1) * tensor.element_size() * 2 >= tensor.untyped_storage().nbytes())


def unsupported(tensor: torch.Tensor) -> str | None:
    """Why a plain tensor cannot be rebuilt from bytes; None where it can."""
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return f"{a_or_an(tensor)}, which does not define how to take it apart (__tensor_flatten__)"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.device.type == "meta":
        return "it has no data (meta)"
    if tensor.is_quantized:
        return "it is quantised by torch.quantize_*"
    return "it is a lazily negated view" if tensor.is_neg() else None


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a parameter, a view of one, or another leaf that is trained."""
    base = base_of(tensor)
    return any(
        isinstance(candidate, nn.Parameter) or (candidate.is_leaf and candidate.requires_grad)
        for candidate in ((tensor,) if base is None else (tensor, base))
    )


def is_autocast_copy(tensor: torch.Tensor, known: KnownStorages) -> bool:
    """Return whether `tensor` is the low-precision copy of a weight that autocast made for one operator, or a view of
    it.

    A trained weight's copy is known by its graph: a cast, straight from a parameter. A frozen weight's copy has no
    graph, and inside an operator it is not known whether autocast is on. So a 16-bit tensor without a gradient, in the
    shape of a parameter of another dtype, is taken for one.
    """
    base = base_of(tensor)
    source = tensor if base is None else base
    cast = source.grad_fn
    if cast is not None:
        leaves = (getattr(node, "variable", None) for node, _ in cast.next_functions)  # AccumulateGrad has its leaf
        return cast.name().startswith("ToCopyBackward") and any(isinstance(leaf, nn.Parameter) for leaf in leaves)
    sixteen_bit = tensor.dtype in (torch.bfloat16, torch.float16)
    return sixteen_bit and not tensor.requires_grad and known.has_weight_like(source)


@dataclass
class OffloadStats:
    """Live counters of one offloader. All sizes in bytes."""

    moved_bytes: int = 0
    """Copied to the host, in `copies` copies."""
    copies: int = 0
    reloaded_bytes: int = 0
    """Copied back, in `reloads` copies, of which `prefetched` were started before backward asked."""
    reloads: int = 0
    prefetched: int = 0
    shared: int = 0
    """Saved tensors whose storage was on the host already."""
    still_on_device: int = 0
    """Times backward found the original still alive on the device and no copy was needed."""
    offload_stalls: int = 0
    """Times forward waited because ``max_inflight_bytes`` were on their way to the host."""
    reload_stalls: int = 0
    """Times backward asked for bytes that were not on the device yet."""
    kept_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of saved tensors left on the device, by reason (a storage saved twice counts twice)."""
    kept_count: Counter[str] = field(default_factory=Counter)
    """Saved tensors left on the device, by reason."""
    host_live_bytes: int = 0
    """Host bytes that saved tensors occupy now (`OffloadConfig.host_bytes`)."""
    host_peak_live_bytes: int = 0

    def keep(self, reason: str, nbytes: int) -> None:
        """Count a tensor that stays on the device."""
        self.kept_bytes[reason] += nbytes
        self.kept_count[reason] += 1

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for a log or a table."""
        return asdict(self) | {"kept_bytes": dict(self.kept_bytes), "kept_count": dict(self.kept_count)}
