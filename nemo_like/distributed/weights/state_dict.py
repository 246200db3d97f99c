"""Weights and optimizer state by the original model's names, whatever the model is wrapped, compiled or sharded in.

State that one mode writes, every other mode and the original model read: no name has ``_checkpoint_wrapped_module``,
``_orig_mod`` or ``module.`` in it. *Whole* state is one plain tensor per name, for files of other tools; *sharded*
state is each rank's own part, for `torch.distributed.checkpoint`, which reads it back onto any other number of ranks.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nemo_like._util.module_tree import check_model
from nemo_like.distributed import launch
from nemo_like.distributed.consistency_checks import wire_device
from nemo_like.distributed.weights.sources import StateDictSource, check_names
from nemo_like.distributed.weights.tensor_locations import (
    STAGES_MARK,
    Slot,
    as_dtensor,
    copy_whole,
    find_slots,
    in_boxes,
    list_names,
    show_shards,
)
from nemo_like.precision import without_float8
from nemo_like.torch_compat import tree_map_only


@torch.no_grad()
def get_model_state(model: nn.Module, *, full: bool = False) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name.

    Args:
        full: whole copies in CPU memory, on rank 0 only (the other ranks get ``{}``); gathered one tensor at a time. A
            collective then. False: this rank's own tensors (DTensors where sharded), not copies.

    Raises:
        ValueError: `full`, and `model` is the part of a model that a rank of a pipeline has.
    """
    check_model(model)
    if full:
        _refuse_part(model, "pipeline.full_state_dict() gathers the whole weights")
    state: dict[str, Tensor] = {}
    for slot in _saved_slots(model):
        tensor = without_float8(slot.tensor.detach())
        if full:
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # a collective
            if launch.rank():
                continue
            tensor = tensor.to("cpu", copy=True)
        state |= dict.fromkeys(slot.names, in_boxes(tensor))
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
    slots = _saved_slots(model)
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
        full: whole copies in CPU memory, on rank 0 only. False: sharded as the parameters are; ``param_groups`` of a
            pipeline's module (`Pipeline.module`) are those of all stages.

    Raises:
        ValueError: `full`, and `model` is the part of a model that a rank of a pipeline has.
    """
    check_model(model)
    if full:
        _refuse_part(model, "torch.distributed.checkpoint saves the parts of all ranks (full=False)")
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=options))
    if full:
        return state
    state["param_groups"] = _groups_of_all_stages(model, state["param_groups"])
    return tree_map_only(DTensor, in_boxes, state)


def set_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, full: bool = False
) -> None:
    """Load the state that `get_optimizer_state` gave, under this or any other way of wrapping the model. A collective.

    Args:
        full: `state` is whole, on rank 0 (that of the other ranks is not looked at). False: sharded as here.

    Raises:
        ValueError: a param group of `optimizer` has no parameter in common with one of `state`'s, or has parameters of
            several that have different options.
    """
    check_model(model)
    show_shards(model)
    own: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    loaded = _own_part(own, state) if full else tree_map_only(DTensor, as_dtensor, dict(state))
    loaded["param_groups"] = [_options_of(group, loaded["param_groups"]) for group in own["param_groups"]]
    set_optimizer_state_dict(model, optimizer, loaded)


def _own_part(part: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """`own`, this rank's state of an optimizer, with the values of `whole`, which rank 0 has; sent one tensor at a time."""
    sent = [tree_map_only(Tensor, lambda value: value.to("meta") if value.ndim else value, dict(whole))]
    if launch.world_size() > 1:
        dist.broadcast_object_list(sent, src=0)
    for name, entry in sent[0]["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.ndim:
                value = _from_first(whole["state"][name][key] if launch.rank() == 0 else value)
            of_name = part["state"].get(name)  # None: of another rank's stage
            if of_name is not None and isinstance(of_name.get(key), Tensor) and of_name[key].shape == value.shape:
                copy_whole(of_name[key], value)
            elif of_name is not None:
                of_name[key] = value
    return {"state": part["state"], "param_groups": sent[0]["param_groups"]}


def _from_first(value: Tensor) -> Tensor:
    """Rank 0's `value`, of which the others know dtype and shape."""
    if launch.world_size() == 1:
        return value
    place = wire_device(None)
    value = value.to(place) if launch.rank() == 0 else torch.empty_like(value, device=place)
    dist.broadcast(value, src=0)
    return value


def _options_of(part: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options of that one of `groups` that has the parameters of `own`."""
    names = set(part["params"])
    options = [group for group in groups if not names.isdisjoint(group["params"])]
    if len({_options(group) for group in options}) != 1:
        problem = f"are in {len(options)} groups with different options" if options else "are in no group"
        raise ValueError(
            f"The parameters of one param group of the optimizer ({list_names(names)}) {problem} of the state to load: "
            "build the optimizer with the groups that it had."
        )
    return {**options[0], "params": part["params"]}


def _options(group: Mapping[str, Any]) -> str:
    return repr(sorted((key, value) for key, value in group.items() if key != "params"))


def _groups_of_all_stages(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The param groups of an optimizer whose parameters are divided over the ranks of a pipeline, the same on each rank.

    Each rank has written its own to a checkpoint otherwise, of which one is read.
    """
    stages = getattr(model, STAGES_MARK, None)
    if stages is None:
        return groups
    everyone: list[Any] = [None] * dist.get_world_size(stages)
    dist.all_gather_object(everyone, groups, group=stages)
    together: dict[str, dict[str, Any]] = {}
    for group in (group for of_rank in everyone for group in of_rank):
        first = together.setdefault(_options(group), {**group, "params": []})
        first["params"] = list(dict.fromkeys([*first["params"], *group["params"]]))
    return list(together.values())


def _refuse_part(model: nn.Module, way_out: str) -> None:
    if hasattr(model, STAGES_MARK):
        raise ValueError(f"full=True, and this module has the stages of one rank of a pipeline alone: {way_out}.")


def refuse_to_save_shards(model: nn.Module) -> None:
    """Let `save_pretrained` of a `model` with sharded parameters raise, before it writes, without weights.

    It would write this rank's shards, and fails in that with an error of Python's about storages. It is not made to
    gather them, since mostly it is called on rank 0 alone, where a collective would wait for ever.
    """
    if callable(getattr(model, "save_pretrained", None)) and any(isinstance(p, DTensor) for p in model.parameters()):
        model.save_pretrained = functools.partial(_save_pretrained, model)  # type: ignore[assignment]


def _save_pretrained(model: nn.Module, *args: object, **kwargs: object) -> Any:
    save = getattr(type(model), "save_pretrained").__get__(model)  # noqa: B009
    arguments = inspect.signature(save).bind(*args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    if arguments.get("state_dict") is None and not arguments.get("distributed_checkpoint"):
        raise RuntimeError(
            f"save_pretrained was called without state_dict, and this rank holds only shards of the parameters of "
            f"{type(model).__name__.removeprefix('FSDP')}. Gather them on every rank with state = "
            "nemo_like.distributed.get_model_state(model, full=True), then call model.save_pretrained(folder, "
            "state_dict=state) on rank 0."
        )
    return save(*args, **kwargs)


def _saved_slots(model: nn.Module) -> list[Slot]:
    """The slots of a state dict, with every FSDP unit sharded."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    show_shards(model)
    return [slot for slot in find_slots(model) if slot.saved]
