"""Weights and optimizer state by the original model's names, whatever the model is wrapped, compiled or sharded in.

State that one mode writes, every other mode and the original model read: no name has ``_checkpoint_wrapped_module``,
``_orig_mod`` or ``module.`` in it. *Whole* state is one plain tensor per name, for files of other tools; *sharded*
state is each rank's own part, for `torch.distributed.checkpoint`, which reads it back onto any other number of ranks.

Not by `torch.distributed.checkpoint.state_dict`: it makes no moments once one parameter has a gradient or a state, so that
those of a part that was not used yet would have no place to be read into, and it knows one piece of a tensor on each rank.
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nemo_like._util.module_tree import check_model
from nemo_like._util.table import grouped
from nemo_like.distributed import launch
from nemo_like.distributed.consistency_checks import wire_device
from nemo_like.distributed.weights.replaced import refuse_whole_moments, watch_steps
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
    _check(model, full, "pipeline.full_state_dict() gathers the whole weights")
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
    source.fill({next(name for name in slot.names if name in state): slot.tensor for slot in slots})


@torch.no_grad()
def get_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool = False) -> dict[str, Any]:
    """``{"state": {name: {...}}, "param_groups": [...]}`` with parameter names in place of numbers. A collective.

    A parameter that trains and has had no gradient yet has the moments that the optimizer would begin with, and counts
    0 steps. `set_optimizer_state` gives it none, so a checkpoint is resumed whichever parameters had gradients.
    A frozen parameter has the moments of earlier steps, if any. `torch.distributed.checkpoint` reads only entries of the
    state to fill: freeze after loading.

    Args:
        full: whole copies in CPU memory, of counters and options too, on rank 0 only. False: sharded as the parameters
            are, and the optimizer's own tensors, not copies; ``param_groups`` of a pipeline's module
            (`Pipeline.module`) are those of all stages.

    Raises:
        ValueError: `full`, and `model` is the part of a model that a rank of a pipeline has; or a parameter of
            `optimizer` is not in `model`.
    """
    _check(model, full, "torch.distributed.checkpoint saves the parts of all ranks (full=False)")
    state: dict[str, Any] = {}
    optimized = _optimized(model, optimizer)
    for name, (parameter, group) in optimized.items():
        entry = optimizer.state.get(parameter) or {}
        if not entry and parameter.requires_grad:
            entry = _first_moments(optimizer, parameter, group)
        if entry:
            entry = tree_map_only(Tensor, _copied if full else in_boxes, dict(entry))
            state |= {name: entry} if not full or launch.rank() == 0 else {}
    names = list(optimized)
    numbered = optimizer.state_dict()["param_groups"]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in numbered]
    if full:
        return (
            {} if launch.rank() else {"state": state, "param_groups": tree_map_only(Tensor, _copied, deepcopy(groups))}
        )
    return {"state": state, "param_groups": _groups_of_all_stages(model, groups)}


@torch.no_grad()
def set_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, full: bool = False
) -> None:
    """Load the state that `get_optimizer_state` gave, under this or any other way of wrapping the model. A collective.

    The tensors of a sharded state become the optimizer's own. Frozen parameters get their moments, too.

    Args:
        full: `state` is whole, on rank 0 (that of the other ranks is not looked at). False: sharded as here.

    Raises:
        ValueError: a param group of `optimizer` has no parameter in common with one of `state`'s, or has parameters of
            several that have different options; or a parameter of `optimizer` is not in `model`.
    """
    check_model(model)
    optimized = _optimized(model, optimizer)
    loaded = _own_part(optimizer, optimized, state) if full else tree_map_only(DTensor, as_dtensor, dict(state))
    names = list(optimized)
    groups = [
        {
            **_options_of({names[number] for number in group["params"]}, loaded["param_groups"]),
            "params": group["params"],
        }
        for group in optimizer.state_dict()["param_groups"]
    ]
    entries: dict[int, Any] = {}
    for number, (name, (parameter, _)) in enumerate(optimized.items()):
        entry = loaded["state"].get(name) or {}
        if not _was_stepped(entry):  # as the constructor left it: some optimizers make their state there
            entry = optimizer.state.get(parameter) or {}
            entry = {} if _was_stepped(entry) else entry
        if entry:
            entries[number] = entry
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


Optimized = dict[str, tuple[Tensor, dict[str, Any]]]


def _optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> Optimized:
    """The parameters of `optimizer` by name, each with its group, in the order of its numbers."""
    names = {id(slot.tensor): slot.name for slot in _saved_slots(model)}
    pairs = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in names for parameter, _ in pairs)
    if foreign:
        raise ValueError(
            f"The optimizer has {foreign} parameter(s) that are not in the model, so they have no name. Build it of the "
            "parameters that the model has after parallelize() and materialize()."
        )
    return {names[id(parameter)]: (parameter, group) for parameter, group in pairs}


def _first_moments(optimizer: torch.optim.Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """The state that `optimizer` would make for `parameter`, before any step; both stay as they are."""
    if isinstance(optimizer, torch.optim.LBFGS):  # whose state is of all parameters together
        return {}
    stand_in = torch.zeros_like(parameter, requires_grad=True)
    stand_in.grad = torch.zeros_like(parameter)
    other = copy(optimizer)
    rate = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    vars(other).update(state=defaultdict(dict), param_groups=[{**group, "params": [stand_in], "lr": rate}])
    type(optimizer).step(other)
    entry = dict(other.state[stand_in])
    if "step" in entry:
        entry["step"] = entry["step"] * 0
    return {} if all(value is None for value in entry.values()) else entry


def _was_stepped(entry: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state of a parameter is that after a gradient."""
    if "step" in entry:
        return bool(entry["step"] != 0)
    if set(entry) == {"momentum_buffer"}:  # SGD's, which counts no steps, and begins without one
        buffer = entry["momentum_buffer"]
        return buffer is not None and bool((buffer.to_local() if isinstance(buffer, DTensor) else buffer).any())
    return bool(entry)


def _copied(value: Tensor) -> Tensor:
    """A whole copy of `value` in CPU memory."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().to("cpu", copy=True)


def _own_part(optimizer: torch.optim.Optimizer, optimized: Optimized, whole: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of the state `whole`, which rank 0 has; sent one tensor at a time."""
    sent = [tree_map_only(Tensor, lambda value: value.to("meta") if value.ndim else value, dict(whole))]
    if launch.world_size() > 1:
        dist.broadcast_object_list(sent, src=0)
    state: dict[str, Any] = {}
    for name, entry in sent[0]["state"].items():
        if name in optimized:  # the others are of another rank's stage
            state[name] = _first_moments(optimizer, *optimized[name])
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.ndim:
                value = _from_first(whole["state"][name][key] if launch.rank() == 0 else value)
            if name not in state:
                continue
            target = state[name].get(key)
            if isinstance(target, Tensor) and target.ndim and target.shape == value.shape:
                copy_whole(target, value)
            else:
                state[name][key] = value.clone() if isinstance(value, Tensor) else value
    return {"state": state, "param_groups": sent[0]["param_groups"]}


def _from_first(value: Tensor) -> Tensor:
    """Rank 0's `value`, of which the others know dtype and shape."""
    if launch.world_size() == 1:
        return value
    place = wire_device(None)
    value = value.to(place) if launch.rank() == 0 else torch.empty_like(value, device=place)
    dist.broadcast(value, src=0)
    return value


def _options_of(names: set[str], groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """That one of `groups` that has the parameters called `names`; several count as one where their options are the same."""
    options = [group for group in groups if not names.isdisjoint(group["params"])]
    if len({_options(group) for group in options}) != 1:
        problem = f"are in {len(options)} groups with different options" if options else "are in no group"
        raise ValueError(
            f"The parameters of one param group of the optimizer ({list_names(names)}) {problem} of the state to load: "
            "build the optimizer with the groups that it had."
        )
    return options[0]


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
    alike = grouped((_options(group), group) for of_rank in everyone for group in of_rank).values()
    names = (dict.fromkeys(name for group in groups for name in group["params"]) for groups in alike)
    return [first | {"params": list(params)} for (first, *_), params in zip(alike, names)]


def _check(model: nn.Module, full: bool, way_out: str) -> None:
    check_model(model)
    if full and hasattr(model, STAGES_MARK):
        raise ValueError(f"full=True, and this module has the stages of one rank of a pipeline alone: {way_out}.")


def guard_shards(model: nn.Module) -> None:
    """Refuse to save the shards of `model` as a model, or to load whole tensors into them.

    `save_pretrained` raises without weights, before it writes. It would write this rank's shards, and fails in that with
    an error of Python's about storages. It is not made to gather them, since mostly it is called on rank 0 alone, where
    a collective would wait for ever. `load_state_dict` raises for whole weights, and the step of an optimizer for whole
    state.
    """
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return
    model.register_load_state_dict_pre_hook(_refuse_whole_weights)
    watch_steps(refuse_whole_moments)
    if callable(getattr(model, "save_pretrained", None)):
        model.save_pretrained = functools.partial(_save_pretrained, model)  # type: ignore[assignment]


def _refuse_whole_weights(model: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        given = state.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(given, Tensor) and not isinstance(given, DTensor):
            raise RuntimeError(
                f"load_state_dict was given the whole {prefix + name!r}, and this rank holds a shard of it. Whole weights "
                "are loaded, on every rank, by nemo_like.distributed.set_model_state(model, state)."
            )


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
