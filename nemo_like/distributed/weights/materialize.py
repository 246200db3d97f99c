"""Give a meta-device model its values after sharding, each rank only its shard."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like._util.module_tree import check_model
from nemo_like._util.rng import rng_state, set_rng_state
from nemo_like._util.words import a_or_an
from nemo_like.distributed import launch
from nemo_like.distributed.weights.replaced import parameters_of, watch_replaced
from nemo_like.distributed.weights.sources import (
    CheckpointUnreadableError,
    StateDictSource,
    StoredSource,
    check_names,
    open_source,
)
from nemo_like.distributed.weights.tensor_locations import CPU_OFFLOAD_MARK, Slot, copy_whole, find_slots
from nemo_like.torch_compat import ActivationWrapper, wrapped_module

InitFn = Callable[[nn.Module], Any]
Source = StateDictSource | StoredSource
T = TypeVar("T")


def materialize(
    model: nn.Module,
    init_fn: InitFn | None = None,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    strict: bool = True,
    seed: int | None = None,
) -> nn.Module:
    """Fill `model`, built on the meta device and sharded, in place; returns it. A collective where it is sharded.

    The values come from one of three places:

    - `init_fn`, called as by ``model.apply(init_fn)``: once for each module that has tensors of its own, children
      first. The module's tensors are *whole* then: drawn values do not depend on the number of ranks, and never is
      more than one module whole. With no argument at all, each module's own initializer is used: ``_init_weights`` of
      the Hugging Face model around it, else ``reset_parameters``.
    - `state_dict`: whole tensors under the original model's names, the same on every rank.
    - `checkpoint`: a folder of `torch.distributed.checkpoint`, or a folder or file of safetensors (each rank reads the
      bytes of its shards), or a file of ``torch.save``.

    Buffers that no state dict has (rotary frequencies, masks) are computed again on the CPU, where an eager build
    makes them, by `init_fn` or else by the initializer as above. Tied parameters stay tied.

    Args:
        model: on the meta device, wholly or in part; with `init_fn`, tensors that are not on it keep their values.
        device: for the parameters; None: this rank's accelerator, or the CPU where `shard_layers` offloads to it.
        strict: a name in the source that the model does not have is an error.
        seed: for `init_fn`; None: drawn from rank 0's generator.

    Raises:
        ValueError: nothing is on the meta device; two sources; names missing or unknown, or shapes different; a
            tensor that no initializer sets.
        CheckpointUnreadableError: a checkpoint that is absent or damaged.
        All of them on every rank, with the model as it was.
    """
    check_model(model)
    slots = find_slots(model)
    sharded = any(isinstance(slot.tensor, DTensor) for slot in slots)

    def prepare() -> tuple[Source | None, list[tuple[nn.Module, InitFn]], torch.device, torch.device]:
        if state_dict is not None and checkpoint is not None:
            raise ValueError("materialize takes a state_dict or a checkpoint; both were given.")
        _refuse_unfit(model, slots)
        meshes = (slot.tensor.device_mesh for slot in slots if isinstance(slot.tensor, DTensor))
        compute = launch.local_device(next((mesh.device_type for mesh in meshes), None))
        place = torch.device("cpu") if hasattr(model, CPU_OFFLOAD_MARK) else compute
        chosen = state_dict if state_dict is not None else checkpoint
        source = None if chosen is None else open_source(chosen, {name for slot in slots for name in slot.names})
        if source is not None:
            check_names(slots, source, strict)
        left = {id(slot.tensor) for slot in slots if slot.tensor.is_meta and not (source is not None and slot.saved)}
        return source, _initializers(model, left, init_fn), compute, torch.device(device) if device else place

    source, initializers, compute, place = _on_every_rank(prepare, sharded)
    before = parameters_of(model)
    values: dict[Slot, Tensor] = {}
    if source is not None:
        values |= _on_every_rank(lambda: _read(slots, source, place, compute), sharded)
    with _seeded(seed, sharded):
        values |= _on_every_rank(lambda: _initialize(initializers, slots, values, place, compute), sharded)
    for slot in slots:
        if slot in values:
            slot.put(values[slot])
        elif not isinstance(slot.tensor, DTensor):
            home = place if slot.is_parameter else compute
            if slot.tensor.device != home:
                slot.put(slot.tensor.detach().to(home))
    watch_replaced(before, model)
    return model


def _on_every_rank(action: Callable[[], T], together: bool) -> T:
    """Return the result of `action`; where it raises on any rank, raise on all, so that none waits for the others."""
    result, error = None, None
    try:
        result = action()
    except Exception as caught:  # noqa: BLE001  (raised again below, on every rank)
        error = caught
    if together and dist.is_initialized():
        messages: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}")
        failed = [(rank, message) for rank, message in enumerate(messages) if message]
        if error is None and failed:
            raise CheckpointUnreadableError(f"materialize failed on rank {failed[0][0]}: {failed[0][1]}")
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _refuse_unfit(model: nn.Module, slots: list[Slot]) -> None:
    if not any(slot.tensor.is_meta for slot in slots):
        raise ValueError("Nothing of the model is on the meta device, so there is nothing to materialize.")
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ValueError(
                    f"{name}.{attribute} is a tensor on the meta device, but neither a parameter nor a buffer, so "
                    "nothing can fill it: register it with register_buffer(..., persistent=False)."
                )


def _read(slots: list[Slot], source: Source, place: torch.device, compute: torch.device) -> dict[Slot, Tensor]:
    values = {slot: _empty(slot, place, compute) for slot in slots if slot.saved}
    source.fill({next(name for name in slot.names if name in source.shapes): values[slot] for slot in values})
    return values


def _empty(slot: Slot, place: torch.device, compute: torch.device) -> Tensor:
    with torch.no_grad():
        return torch.empty_like(slot.tensor.detach(), device=place if slot.is_parameter else compute)


def _initializers(model: nn.Module, left: set[int], init_fn: InitFn | None) -> list[tuple[nn.Module, InitFn]]:
    """Return each module with a tensor in `left` and its initializer; children first, as `nn.Module.apply`."""
    chosen: list[tuple[nn.Module, InitFn]] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, name: str, around: InitFn | None) -> None:
        while isinstance(module, ActivationWrapper):
            module = wrapped_module(module)
        if module in seen:
            return
        seen.add(module)
        # Every Hugging Face model has it; the innermost one around a module knows the module best.
        around = getattr(module, "_init_weights", None) or around
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, around)
        if not any(id(t) in left for t in (*module._parameters.values(), *module._buffers.values())):
            return
        itself = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if init_fn is not None:
            chosen.append((module, init_fn))
        elif around is not None:
            chosen.append((module, around))
        elif callable(itself):
            chosen.append((module, lambda _: itself()))
        else:
            names = [n for n, t in (*module._parameters.items(), *module._buffers.items()) if id(t) in left]
            raise ValueError(
                f"Nothing can compute {', '.join(names)} of {name or 'the model'!r}, {a_or_an(module)}: it has "
                "no reset_parameters(). Give it one, or pass init_fn."
            )

    visit(model, "", None)
    return chosen


def _initialize(
    initializers: list[tuple[nn.Module, InitFn]],
    slots: list[Slot],
    known: Mapping[Slot, Tensor],
    place: torch.device,
    compute: torch.device,
) -> dict[Slot, Tensor]:
    """Run each initializer on its module made whole and keep this rank's part; the modules are left as they were."""
    slot_of = {id(slot.tensor): slot for slot in slots}
    values: dict[Slot, Tensor] = {}
    for module, initialize in initializers:
        whole: dict[Slot, Tensor] = {}
        before: list[tuple[dict[str, Any], str, Tensor]] = []
        registries: list[dict[str, Any]] = [module._parameters, module._buffers]
        for registered in registries:
            for name, tensor in registered.items():
                if tensor is None or not tensor.is_meta:
                    continue
                slot = slot_of[id(tensor)]
                # Values that an eager build computes on the CPU may differ elsewhere in the last bit; weights are
                # drawn.
                whole[slot] = _unset(slot, compute if slot.is_parameter else torch.device("cpu"))
                before.append((registered, name, tensor))
        try:
            for registered, name, tensor in before:
                registered[name] = whole[slot_of[id(tensor)]]
            with torch.no_grad():
                initialize(module)
            for registered, name, tensor in before:
                slot = slot_of[id(tensor)]
                if slot not in known:
                    _refuse_unset(slot, registered[name])
                    values[slot] = _empty(slot, place, compute)
                    copy_whole(values[slot], registered[name])
        finally:
            for registered, name, tensor in before:
                registered[name] = tensor
    return values


def _unset(slot: Slot, device: torch.device) -> Tensor:
    """A whole tensor in the slot's shape, full of values that no initializer leaves."""
    whole = torch.empty(slot.tensor.shape, dtype=slot.tensor.dtype, device=device)
    if whole.is_floating_point() or whole.is_complex():
        whole.fill_(torch.nan)
    elif whole.dtype != torch.bool:
        whole.fill_(torch.iinfo(whole.dtype).max)
    return nn.Parameter(whole, requires_grad=slot.tensor.requires_grad) if slot.is_parameter else whole


def _refuse_unset(slot: Slot, whole: Tensor) -> None:
    if whole.is_floating_point() or whole.is_complex():
        unset = whole.isnan().any()
    elif whole.dtype != torch.bool and whole.numel():
        unset = (whole == torch.iinfo(whole.dtype).max).all()
    else:
        return
    if unset:
        raise ValueError(f"{slot.name} was not set by its module's initializer: pass an init_fn that sets it.")


@contextmanager
def _seeded(seed: int | None, together: bool) -> Iterator[None]:
    """The same random numbers on every rank inside, and the generators as they were afterwards."""
    drawn = [int(torch.randint(2**62, ())) if seed is None else seed]
    if together and dist.is_initialized():
        dist.broadcast_object_list(drawn, src=0)
    before = rng_state()
    try:
        torch.manual_seed(drawn[0])
        yield
    finally:
        set_rng_state(before)
