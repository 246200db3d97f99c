"""Find the operators of a region that neither backward nor a recomputed operator reads, by watching one forward."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_like._util.op_lookup import Op
from nemo_like._util.tensors import is_wrapped, tensors_in
from nemo_like.activation_checkpointing import ops
from nemo_like.activation_checkpointing.engine.handles import Kept
from nemo_like.activation_checkpointing.policy import RECOMPUTE
from nemo_like.torch_compat import local_part


def storage_of(tensor: Tensor) -> Any:
    """Return the storage of this rank's part of a tensor; None: its layout has none of its own (sparse, mkldnn)."""
    local = local_part(tensor)
    return local.untyped_storage() if local.layout is torch.strided else None


class Liveness:
    """The operators of one forward as they run, with the tensors that they read and that autograd saves."""

    def __init__(self) -> None:
        # For each operator: its entry (None: it always runs), and the operators that wrote the tensors that it reads.
        self._ops: list[tuple[Kept | None, set[int]]] = []
        # By storage, weakly: an address is used again.
        self._writers: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._saved: set[int] = set()  # Operators that made a tensor that autograd saves.
        # True where nothing is left out: a placeholder can't replace a DTensor, and who reads a sparse tensor is not seen.
        self._unknown = False

    def _of(self, tensor: Tensor) -> list[int]:
        storage = storage_of(tensor)
        if storage is None:
            self._unknown = True
            return []
        return self._writers.setdefault(storage, [])

    def ran(self, op: Op, entry: Kept | None, args: Any, kwargs: Any, out: Any) -> None:
        """Note a call; `entry`: of one with a decision."""
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(out)
        self._unknown = self._unknown or is_wrapped(map(type, (*inputs, *outputs)))
        entry, index = entry if outputs else None, len(self._ops)  # one without tensors always runs
        self._ops.append((entry, {writer for tensor in inputs for writer in self._of(tensor)}))
        for tensor in (*(outputs if entry is not None else ()), *ops.written_tensors(op, args, kwargs)):
            self._of(tensor).append(index)

    def packed(self, tensor: Tensor) -> None:
        """Note that autograd saves `tensor`."""
        self._saved |= set(self._of(tensor))

    def left_out(self, packs: int) -> tuple[Mapping[Op, frozenset[int]], Mapping[Op, int]]:
        """Return the calls to leave out, by kind; and how many calls of each kind there were.

        Args:
            packs: tensors that autograd saved in all; operators after the last of them are not recomputed anyway.
        """
        counts: dict[Op, int] = {}
        places = list[tuple[Op, int] | None]()
        for entry, _ in self._ops:
            places.append(None if entry is None else (entry.op, counts.get(entry.op, 0)))
            if entry is not None:
                counts[entry.op] = counts.get(entry.op, 0) + 1
        runs = set[int]()
        for index in reversed(range(len(self._ops))):
            entry, reads = self._ops[index]
            if entry is not None and (entry.decision is not RECOMPUTE or entry.packs_before == packs):
                continue
            facts = None if entry is None else ops.facts(entry.op)
            always = facts is None or facts.collective or (facts.random and not facts.attention)
            if always or index in self._saved or index in runs:
                runs |= {index, *reads}
        dropped: dict[Op, set[int]] = {}
        for index, ((entry, _), place) in enumerate(zip(self._ops, places, strict=True)):
            reachable = entry is not None and entry.decision is RECOMPUTE and entry.packs_before < packs
            if reachable and place is not None and index not in runs and not self._unknown:
                dropped.setdefault(place[0], set()).add(place[1])
        return {op: frozenset(calls) for op, calls in dropped.items()}, counts
