"""Bytes of FSDP2's units: what is gathered, reduced and stored on one rank.

Follows what PyTorch's ``fully_shard`` does (torch 2.13): each parameter is sharded on dim 0, padded to a multiple of
the shard axis; a unit is gathered into one flat buffer and copied out of it; its gradients are copied into one flat
buffer and reduced; one such buffer stays alive until the next unit's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_like.distributed.units import plan_units
from nemo_like.module_tree import bare

OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-fused", "adamw-8bit", "sgd", "sgd-momentum")


@dataclass(frozen=True)
class Unit:
    """One FSDP2 unit on one rank, bytes."""

    kind: str
    """``layer`` | ``tail`` | ``root`` | ``dtype``."""
    shard: int
    """Its parameters as stored."""
    gathered: int
    """Its parameters gathered, in the dtype of forward; also the flat buffer of the gather."""
    gather_input: int
    """The cast copy of its shard that the gather reads; 0 where the shard itself is read."""
    reduce_input: int
    reduce_output: int
    grad: int
    """Its gradients once reduced, in the dtype of the parameters."""
    reshard: bool
    """Freed after forward."""
    largest: int
    """Its largest single shard: what an optimizer's temporary is sized by."""


@dataclass(frozen=True)
class Sharding:
    """How a model's state lies on one rank."""

    units: tuple[Unit, ...]
    """Units of the layers, each once."""
    modules: tuple[int, ...]
    """For each of them, the id of the bare layer."""
    tail: Unit | None
    root: Unit
    replicated: int
    """Parameters that every rank holds whole."""
    world: int
    """Ranks that parameters are sharded over; 1: no FSDP."""
    prefetch: tuple[int, int]
    """Units fetched ahead in forward and in backward."""
    tail_params: frozenset[int]
    """Ids of the tail's parameters."""

    @property
    def all(self) -> tuple[Unit, ...]:
        """Every unit once."""
        return (*self.units, *((self.tail,) if self.tail else ()), self.root)

    @property
    def params(self) -> int:
        """Parameter bytes on this rank."""
        return sum(unit.shard for unit in self.all) + self.replicated


def sharding_of(
    model: nn.Module, layers: Sequence[Any], *, shard_ranks: int, param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None, reshard_after_forward: bool | int | None = None,
    prefetch: tuple[int, int] = (1, 1),
) -> Sharding:  # fmt: skip
    """The units that `nemo_like.distributed.shard.shard_layers` would make, in bytes on one of `shard_ranks` ranks."""
    plan = plan_units(model, layers)
    last = plan.layers[-1] if plan.layers else None

    def unit(source: Any) -> Unit:
        if source.kind == "layer" and source is not last:
            reshard = True if reshard_after_forward is None else bool(reshard_after_forward)
        else:
            reshard = reshard_after_forward if isinstance(reshard_after_forward, bool) and source.kind != "dtype" else False
        return _unit(source.kind, source.params, shard_ranks, param_dtype, reduce_dtype, bool(reshard))

    root = unit(plan.root)
    for extra in plan.by_dtype:
        root = _join(root, unit(extra))
    return Sharding(
        units=tuple(unit(source) for source in plan.layers),
        modules=tuple(id(bare(source.modules[0])) for source in plan.layers),
        tail=unit(plan.tail) if plan.tail else None,
        root=root,
        replicated=sum(p.numel() * p.element_size() for p in plan.replicated),
        world=shard_ranks,
        prefetch=prefetch,
        tail_params=frozenset(id(p) for p in plan.tail.params) if plan.tail else frozenset(),
    )


def _unit(
    kind: str, params: Sequence[nn.Parameter], ranks: int, param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None, reshard: bool,
) -> Unit:  # fmt: skip
    shards = [(_padded(p, ranks) // ranks, p) for p in params]
    trained = [(n, p) for n, p in shards if p.requires_grad]
    compute = [(n, (param_dtype or p.dtype).itemsize) for n, p in shards]
    reduce = [(n, (reduce_dtype or param_dtype or p.dtype).itemsize) for n, p in trained]
    stored = [n * p.element_size() for n, p in shards]
    cast = param_dtype is not None
    return Unit(
        kind=kind,
        shard=sum(stored),
        gathered=sum(n * size for n, size in compute) * ranks,
        gather_input=sum(n * size for n, size in compute) if cast else 0,
        reduce_input=sum(n * size for n, size in reduce) * ranks,
        reduce_output=sum(n * size for n, size in reduce),
        grad=sum(n * p.element_size() for n, p in trained),
        reshard=reshard,
        largest=max((n * p.element_size() for n, p in trained), default=0),
    )


def _join(a: Unit, b: Unit) -> Unit:
    numbers = {k: getattr(a, k) + getattr(b, k) for k in vars(a) if k not in ("kind", "reshard", "largest")}
    return Unit(kind=a.kind, reshard=a.reshard, largest=max(a.largest, b.largest), **numbers)


def _padded(param: torch.Tensor, ranks: int) -> int:
    if param.dim() == 0:
        return param.numel() * ranks
    return math.ceil(param.shape[0] / ranks) * ranks * math.prod(param.shape[1:])


def optimizer_bytes(sharding: Sharding, name: str, trainable_shard: int) -> tuple[int, int]:
    """State and step temporaries of an optimizer on one rank, bytes.

    ``adamw`` and ``sgd`` loop over parameters (PyTorch's default for FSDP2's parameters); ``-foreach`` handles all at
    once, with a temporary as large as all of them; ``-fused`` needs none. 8-bit states: one byte each and a float32
    scale per 256 values (Dettmers et al., arXiv 2110.02861).

    Raises:
        ValueError: an unknown name.
    """
    largest = max(unit.largest for unit in sharding.all)
    table = {
        "adamw": (2 * trainable_shard, 2 * largest),
        "adamw-foreach": (2 * trainable_shard, trainable_shard),
        "adamw-fused": (2 * trainable_shard, 0),
        "adamw-8bit": (trainable_shard // 2 + trainable_shard // 128, 0),
        "sgd": (0, 0),
        "sgd-momentum": (trainable_shard, 0),
    }
    if name not in table:
        raise ValueError(f"optimizer is {name!r}; it must be one of {', '.join(OPTIMIZERS)}.")
    return table[name]
