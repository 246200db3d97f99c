"""Where a model's tensors are registered, under the names of the bare model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

_ADDED_BY_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")

CPU_OFFLOAD_MARK = "_nemo_like_cpu_offload"
"""Set on a root whose shards wait in host memory, which FSDP2 tells nobody in public."""

STAGES_MARK = "_nemo_like_stages"
"""The attribute of a module with the stages of one rank of a pipeline that has the pipeline's process group."""


@dataclass(eq=False)
class Slot:
    """One parameter or buffer, and every place it is registered in (more than one where it is tied)."""

    tensor: Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """The bare model's names, in the order in which the model registers them."""
    saved: bool = True
    """Whether it is part of a state dict; false for non-persistent buffers."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    def put(self, tensor: Tensor) -> None:
        """Register `tensor` in every place instead; a parameter keeps `requires_grad` and what was set on it."""
        if self.is_parameter:
            param = nn.Parameter(tensor, requires_grad=self.tensor.requires_grad)
            param.__dict__.update(self.tensor.__dict__)
            tensor = param
        for module, name in self.places:
            registered: dict[str, Any] = module._parameters if self.is_parameter else module._buffers
            registered[name] = tensor
        self.tensor = tensor


def bare_name(name: str) -> str:
    """`name` without what checkpoint and compile wrappers add to it.

    >>> bare_name("layers.0._checkpoint_wrapped_module.mlp._orig_mod.weight")
    'layers.0.mlp.weight'
    """
    for added in _ADDED_BY_WRAPPERS:
        name = name.replace(added, "")
    return name


def find_slots(model: nn.Module) -> list[Slot]:
    """Every parameter and buffer of `model`, once each, in the order of registration."""
    slots: dict[int, Slot] = {}
    seen: set[tuple[str, str]] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        transient = module._non_persistent_buffers_set
        for local, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = bare_name(f"{prefix}.{local}" if prefix else local)
            if tensor is None or (name, local) in seen:
                continue
            seen.add((name, local))
            slot = slots.setdefault(id(tensor), Slot(tensor, saved=local not in transient))
            slot.names.append(name)
            if not any(holder is module and at == local for holder, at in slot.places):
                slot.places.append((module, local))
    return list(slots.values())


def show_shards(model: nn.Module) -> None:
    """Have every FSDP unit register its shards: a forward without backward leaves some units gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copy the unsharded `whole` into `target`, of which this rank may hold a part; no communication.

    Args:
        target: a plain tensor or a DTensor of any sharding, on any device.
        whole: the same global shape, any dtype (cast) and device, with the same values on every rank.
    """
    with torch.no_grad():
        if isinstance(target, DTensor):
            # src_data_rank=None: each rank cuts its own part out of its own copy.
            part = distribute_tensor(
                whole.detach().to(target.device), target.device_mesh, target.placements, src_data_rank=None
            )
            target.to_local().copy_(part.to_local())
        else:
            target.copy_(whole)


def list_names(names: Iterable[str], limit: int = 5) -> str:
    """``a, b, c and 7 more``."""
    listed = sorted(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
