"""Weights and optimizer state by the bare model's names, whatever the model is wrapped, compiled or sharded in.

What one mode writes, every other mode and the bare model read: no name has ``_checkpoint_wrapped_module``,
``_orig_mod`` or ``module.`` in it. *Whole* state is one plain tensor per name, for files of other tools; *sharded*
state is what each rank holds, for `torch.distributed.checkpoint`, which reads it back onto any other number of ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nemo_like.distributed import launch
from nemo_like.distributed.expert_parallel.list_state import (
    Pieces,
    list_pieces,
    optimizer_apart,
    optimizer_together,
    own_views,
)
from nemo_like.distributed.slots import Slot, bare_name, copy_whole, find_slots, show_shards
from nemo_like.distributed.sources import StateDictSource, check_names
from nemo_like.float8 import without_float8
from nemo_like.module_tree import check_model


@torch.no_grad()
def get_model_state(model: nn.Module, *, full: bool = False) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name.

    Args:
        full: whole copies in host memory, on rank 0 only (the other ranks get ``{}``); gathered one tensor at a time. A
            collective then. False: this rank's own tensors (DTensors where sharded), not copies.
    """
    check_model(model)
    state: dict[str, Tensor] = {}
    pieces = list_pieces(model)
    for slot in _saved_slots(model):
        tensor = without_float8(slot.tensor.detach())
        if full:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if launch.rank() != 0:
                continue
            tensor = whole.to("cpu", copy=True)
        if slot.name not in pieces:
            state |= dict.fromkeys(slot.names, tensor)
            continue
        own = pieces[slot.name]  # on a rank without the others' experts, without their names
        state |= {own[number]: view for number, view in own_views(tensor).items()}
    return state


@torch.no_grad()
def set_model_state(model: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Copy `state` into the model's parameters and persistent buffers; they stay the same objects.

    Args:
        state: whole tensors, the same on every rank (no communication), or DTensors (a collective unless they are
            sharded as the model's). One name of a tied parameter is enough.
        strict: a name that the model does not have is an error.

    Raises:
        ValueError: names missing or unknown, shapes different; nothing has been copied then.
    """
    check_model(model)
    pieces = list_pieces(model)
    slots = [own for slot in _saved_slots(model) for own in _by_expert(slot, pieces)]
    here = {name for slot in slots for name in slot.names}
    elsewhere = {name for owned in pieces.values() for name in owned} - here
    state = {name: value for name, value in state.items() if name not in elsewhere}
    source = StateDictSource(state)
    check_names(slots, source, strict)
    for slot in slots:
        name = next(name for name in slot.names if name in state)
        value, target = state[name], slot.tensor
        if isinstance(value, DTensor) and isinstance(target, DTensor) and value.placements == target.placements:
            target.copy_(value)
        else:
            copy_whole(target, source.get(name))


def get_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool = False) -> dict[str, Any]:
    """``{"state": {name: {...}}, "param_groups": [...]}`` with parameter names in place of numbers. A collective.

    Args:
        full: whole copies in host memory, on rank 0 only. False: sharded as the parameters are.
    """
    check_model(model)
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    return optimizer_apart(get_optimizer_state_dict(model, optimizer, options=options), list_pieces(model))


def set_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, full: bool = False
) -> None:
    """Load what `get_optimizer_state` gave, under this or any other way of wrapping the model. A collective.

    Args:
        full: `state` is whole, on rank 0 (what the other ranks pass is not looked at). False: sharded as here.
    """
    check_model(model)
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full and launch.world_size() > 1)
    pieces = list_pieces(model)
    if pieces:
        show_shards(model)
        stacked = {bare_name(name): p for name, p in model.named_parameters() if bare_name(name) in pieces}
        state = optimizer_together(state, pieces, stacked)
    set_optimizer_state_dict(model, optimizer, dict(state), options=options)


def refuse_to_save_shards(model: nn.Module) -> None:
    """Where `model` has a `save_pretrained` and sharded parameters: let it raise, before it writes, without weights.

    It would write this rank's shards, and fails in that with an error of Python's about storages. It is not made to
    gather them, since mostly it is called on rank 0 alone, where a collective would wait for ever.
    """
    if callable(getattr(model, "save_pretrained", None)) and any(isinstance(p, DTensor) for p in model.parameters()):
        model.save_pretrained = functools.partial(_save_pretrained, model)  # type: ignore[assignment]


def _save_pretrained(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    save = getattr(type(model), "save_pretrained").__get__(model)  # noqa: B009
    given = inspect.signature(save).bind(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    if given.get("state_dict") is None and not given.get("distributed_checkpoint"):
        raise RuntimeError(
            f"save_pretrained was called without state_dict, and this rank holds only shards of the parameters of "
            f"{type(model).__name__.removeprefix('FSDP')}. Gather them on every rank with state = "
            "nemo_like.distributed.get_model_state(model, full=True), then call model.save_pretrained(folder, "
            "state_dict=state) on rank 0."
        )
    return save(*args, **kwargs)


def _by_expert(slot: Slot, pieces: Pieces) -> list[Slot]:
    """`slot`, or where it is a stack of experts one for each that this rank has some of."""
    if slot.name not in pieces:
        return [slot]
    return [Slot(view, names=[pieces[slot.name][number]]) for number, view in own_views(slot.tensor.detach()).items()]


def _saved_slots(model: nn.Module) -> list[Slot]:
    """The slots of a state dict, with every FSDP unit sharded."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    show_shards(model)
    return [slot for slot in find_slots(model) if slot.saved]
