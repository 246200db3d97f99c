"""Stacked experts under the names that they have in their list, so that a state dict is that of the bare model.

A rank has the experts that are its own, as views of the stack: what is read into them is in the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from nemo_like._util.module_tree import bare_modules
from nemo_like.distributed.expert_parallel.expert_lists import StackedExperts

Pieces = Mapping[str, Sequence[str]]
"""Name of a stacked weight → the names that it has in each expert of the list, in order."""


def list_pieces(model: nn.Module) -> dict[str, list[str]]:
    """The `Pieces` of all stacks in `model`; empty: it has none."""
    return {
        f"{fqn}.{name}": [f"{fqn}.{stack.piece(name, number)}" for number in range(len(stack))]
        for fqn, stack in bare_modules(model)
        if isinstance(stack, StackedExperts)
        for name in stack.names
    }


def own_views(stacked: Tensor) -> dict[int, Tensor]:
    """Number of an expert → this rank's part of its weight, for those that this rank has some of.

    A DTensor over the ranks that share the expert, or a plain tensor where it is whole.
    """
    if not isinstance(stacked, DTensor):
        return dict(enumerate(stacked.unbind(0)))
    local, mesh, names = stacked.to_local(), stacked.device_mesh, stacked.device_mesh.mesh_dim_names or ()
    each = stacked.shape[0] // mesh["ep"].size()
    first = mesh["ep"].get_local_rank() * each
    others = [(name, place) for name, place in zip(names, stacked.placements, strict=True) if name != "ep"]
    rows = [name for name, place in others if getattr(place, "dim", None) == 0]
    if rows:  # whole experts, further dealt out
        first += mesh[rows[0]].get_local_rank() * -(-each // mesh[rows[0]].size())
    if rows or not others:
        return {first + at: view for at, view in enumerate(local.unbind(0))}
    rest = mesh[tuple(name for name, _ in others)]
    placements = [place if place.is_replicate() else Shard(place.dim - 1) for _, place in others]  # type: ignore[attr-defined]
    shape = stacked.shape[1:]
    stride = torch.empty(shape, device="meta").stride()
    return {
        first + at: DTensor.from_local(view, rest, placements, run_check=False, shape=shape, stride=stride)
        for at, view in enumerate(local.unbind(0))
    }


def optimizer_apart(state: dict[str, Any], pieces: Pieces) -> dict[str, Any]:
    """An optimizer's state with the names of `pieces` in the place of the stacked ones."""
    made: dict[str, Any] = {}
    for name, entry in state.get("state", {}).items():
        if name not in pieces:
            made[name] = entry
            continue
        views = {key: own_views(value) for key, value in entry.items() if value.ndim}  # a number of steps has none
        for number in next(iter(views.values()), {}):
            made[pieces[name][number]] = {
                key: views[key][number] if key in views else value for key, value in entry.items()
            }
    groups = [
        group | {"params": [own for name in group["params"] for own in pieces.get(name, [name])]}
        for group in state.get("param_groups", [])
    ]
    return state | ({"state": made, "param_groups": groups} if state else {})


def optimizer_together(state: Mapping[str, Any], pieces: Pieces, like: Mapping[str, Tensor]) -> dict[str, Any]:
    """The opposite of `optimizer_apart`; like: the stacked weights by name."""
    if not state:
        return dict(state)
    made = dict(state["state"])
    stacked_as = {own: name for name, owned in pieces.items() for own in owned}
    for name, owned in pieces.items():
        found = [made.pop(own) for own in owned if own in made]
        if found:
            made[name] = {key: _stack([entry[key] for entry in found], like[name]) for key in found[0]}
    groups = [
        group | {"params": list(dict.fromkeys(stacked_as.get(name, name) for name in group["params"]))}
        for group in state["param_groups"]
    ]
    return dict(state) | {"state": made, "param_groups": groups}


def _stack(values: Sequence[Any], like: Tensor) -> Any:
    if not isinstance(values[0], Tensor) or values[0].ndim == 0:
        return values[0]
    if len(values) == len(like) and not isinstance(values[0], DTensor):
        return torch.stack(list(values))  # whole
    local = torch.stack([value.to_local() if isinstance(value, DTensor) else value for value in values])
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
