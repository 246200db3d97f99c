"""Give a meta-device model its values after sharding, each rank only its shard."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from nemo_like._util.module_tree import check_model
from nemo_like._util.rng import rng_state, set_rng_state
from nemo_like._util.table import grouped
from nemo_like._util.words import a_or_an
from nemo_like.distributed import launch
from nemo_like.distributed.consistency_checks import together
from nemo_like.distributed.weights.replaced import parameters_of, watch_replaced
from nemo_like.distributed.weights.sources import (
    CheckpointUnreadableError,
    Naming,
    StateDictSource,
    StoredSource,
    check_names,
    open_source,
)
from nemo_like.distributed.weights.tensor_locations import (
    CPU_OFFLOAD_MARK,
    Slot,
    adapters,
    copy_whole,
    find_slots,
    original_classes,
)
from nemo_like.torch_compat import ActivationWrapper, tree_map_only, wrapped_module
from nemo_like.transformers_compat import (
    INITIALIZED,
    PEFT_CONFIG,
    RESET_LORA,
    NamesInModel,
    guarded_initializers,
    model_base,
    names_in_model,
    without_peft,
)

InitFn = Callable[[nn.Module], Any]
Initializers = tuple[list[tuple[nn.Module, InitFn]], list[tuple[nn.Module, InitFn]]]
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

    - `init_fn`, called as by ``model.apply(init_fn)``: once for each module with tensors in it or below it, children
      first. Each tensor that the call uses is *whole* until it returns, so drawn values do not depend on the number of
      ranks. With no argument at all, each module's own initializer is used, as an eager build does: ``_init_weights``
      of the Hugging Face model around it, else ``reset_parameters``. After ``torch.manual_seed(seed)``, the model's
      ``initialize_weights()`` draws the same values on the same device.
    - `state_dict`: whole tensors under the original model's names, the same on every rank.
    - `checkpoint`: a folder of `torch.distributed.checkpoint`, or a folder or file of safetensors (each rank reads the
      bytes of its shards), or a file of ``torch.save``. Safetensors are named as in the files of transformers, which
      are read as ``from_pretrained`` reads them; with PEFT, they are the base model's, and adapters of LoRA get the
      values that PEFT begins with.

    Buffers that no state dict has (rotary frequencies, masks) are computed again on the CPU, where an eager build
    makes them, by `init_fn` or else by the initializer as above. Tied parameters stay tied.

    Args:
        model: on the meta device, wholly or in part. Tensors that are not on it keep their values, and without
            `init_fn`, one that its own module's initializer would give other values is an error.
        device: for the parameters; None: this rank's accelerator, or the CPU where `shard_layers` offloads to it.
        strict: a name in the source that the model does not have is an error.
        seed: for `init_fn`; None: drawn from rank 0's generator.

    Raises:
        ValueError: nothing is on the meta device; two sources; names missing or unknown, or shapes different; a
            tensor that no initializer sets; a tensor with values that may not be meant.
        CheckpointUnreadableError: a checkpoint that is absent or damaged.
        All of them on every rank, with the model as it was.
    """
    check_model(model)
    slots = find_slots(model)
    sharded = any(isinstance(slot.tensor, DTensor) for slot in slots)
    made_by_peft = adapters(slots) if hasattr(model, PEFT_CONFIG) else set()

    def prepare() -> tuple[Source | None, list[Slot], Initializers, torch.device, torch.device]:
        if state_dict is not None and checkpoint is not None:
            raise ValueError("materialize takes a state_dict or a checkpoint; both were given.")
        _refuse_unfit(model, slots)
        meshes = (slot.tensor.device_mesh for slot in slots if isinstance(slot.tensor, DTensor))
        compute = launch.local_device(next((mesh.device_type for mesh in meshes), None))
        place = torch.device("cpu") if hasattr(model, CPU_OFFLOAD_MARK) else compute
        chosen = state_dict if state_dict is not None else checkpoint
        source = None if chosen is None else open_source(chosen, _naming(model, slots))
        stored: list[Slot] = []
        if source is not None:
            # PEFT initialises its own tensors, unless the source has it.
            absent = made_by_peft - {slot for slot in made_by_peft if any(name in source.shapes for name in slot.names)}
            stored = [slot for slot in slots if slot.saved and slot not in absent]
            check_names(stored, source, strict)
        left = {id(slot.tensor) for slot in slots if slot.tensor.is_meta} - {id(slot.tensor) for slot in stored}
        return source, stored, _initializers(model, left, init_fn), compute, torch.device(device) if device else place

    source, stored, initializers, compute, place = _on_every_rank(prepare, sharded)
    before = parameters_of(model)
    values: dict[Slot, Tensor] = {}
    if source is not None:
        values |= _on_every_rank(lambda: _read(stored, source, place, compute), sharded)
    with _seeded(seed, sharded):
        # Constructors make some tensors outside of meta: ``torch.Tensor(n)`` is real memory that was never written.
        ran = {id(module) for module, _ in initializers[0]} if init_fn is None else set()
        doubtful = {s for s in slots if not hasattr(s.tensor, INITIALIZED) and any(id(m) in ran for m, _ in s.places)}
        known = {slot: slot.tensor for slot in slots if not slot.tensor.is_meta and slot not in doubtful} | values
        made = _MadeWhole(known, place, compute)
        values |= _on_every_rank(lambda: _initialize(model, initializers, slots, made, init_fn is not None), sharded)
    for slot in slots:
        if slot in values:
            slot.put(values[slot])
        elif not isinstance(slot.tensor, DTensor):
            home = place if slot.is_parameter else compute
            if slot.tensor.device != home:
                slot.put(slot.tensor.detach().to(home))
    watch_replaced(before, model)
    return model


def _on_every_rank(action: Callable[[], T], sharded: bool) -> T:
    """Return the result of `action`; where it raises on any rank, raise on all, so that none waits for the others."""

    def elsewhere(rank: int, kind: str, words: str) -> Exception:
        return CheckpointUnreadableError(f"materialize failed on rank {rank}: {kind}: {words}")

    with together([None] if sharded and dist.is_initialized() else [], elsewhere):
        return action()


def _refuse_unfit(model: nn.Module, slots: list[Slot]) -> None:
    if not any(slot.tensor.is_meta for slot in slots):
        raise ValueError("Nothing of the model is on the meta device, so there is nothing to materialize.")
    registered = set(model.modules())
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            hidden = [m for m in value if isinstance(m, nn.Module)] if isinstance(value, list) else []
            if any(tensor.is_meta for m in hidden if m not in registered for tensor in m.parameters()):
                raise ValueError(
                    f"{name}.{attribute} is a list of modules on the meta device. A module in a list is not registered, "
                    "so nothing can fill its parameters: make it an nn.ModuleList, or build the model on the CPU."
                )
            if isinstance(value, Tensor) and value.is_meta:
                raise ValueError(
                    f"{name}.{attribute} is a tensor on the meta device, but neither a parameter nor a buffer, so "
                    "nothing can fill it: register it with register_buffer(..., persistent=False)."
                )


def _naming(model: nn.Module, slots: list[Slot]) -> Naming | None:
    """Return the mapping from the files of a model of transformers, which PEFT may have wrapped; None: another model."""
    prefix, base = "", model
    if hasattr(model, PEFT_CONFIG):
        prefix, base = next(
            ((f"{n}.", m) for n, m in model.named_modules() if isinstance(m, model_base() or ())), ("", model)
        )
    if not isinstance(base, model_base() or ()):
        return None
    names = grouped(
        (without_peft(name.removeprefix(prefix)) if prefix else name, name)
        for slot in slots
        for name in (slot.names if slot.saved else ())
    )

    def naming(stored: Collection[str]) -> NamesInModel:
        with original_classes(base):
            return names_in_model(base, names, stored)

    return naming


def _read(slots: list[Slot], source: Source, place: torch.device, compute: torch.device) -> dict[Slot, Tensor]:
    values = {slot: _empty(slot, place, compute) for slot in slots}
    source.fill({next(name for name in slot.names if name in source.shapes): values[slot] for slot in values})
    return values


def _empty(slot: Slot, place: torch.device, compute: torch.device) -> Tensor:
    with torch.no_grad():
        return torch.empty_like(slot.tensor.detach(), device=place if slot.is_parameter else compute)


def _initializers(model: nn.Module, left: set[int], init_fn: InitFn | None) -> Initializers:
    """Return each module with a tensor in `left`, in it or below it, and its initializer; children first, as `apply`.

    The second list has modules that have ``reset_parameters``, which the model around them may call in vain.
    """
    chosen: list[tuple[nn.Module, InitFn]] = []
    constructors: list[tuple[nn.Module, InitFn]] = []
    seen: set[nn.Module] = set()
    base = model_base() or ()
    kinds = {name: config.init_lora_weights for name, config in getattr(model, PEFT_CONFIG, {}).items()}

    def visit(module: nn.Module, name: str, around: InitFn | None, set_above: bool) -> bool:
        while isinstance(module, ActivationWrapper):
            module = wrapped_module(module)
        if module in seen:
            return False
        seen.add(module)
        if around is None or isinstance(module, base):  # of models of transformers, the innermost one
            around = getattr(module, "_init_weights", None) or around
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        itself = (lambda _: reset()) if callable(reset) else None
        adapted = hasattr(module, RESET_LORA)
        if adapted:
            itself = partial(_reset_lora, kinds)
        initialize = init_fn or (itself if adapted else around) or itself
        set_above = set_above or initialize is not None
        own = [n for n, t in (*module._parameters.items(), *module._buffers.items()) if id(t) in left]
        below = [
            # PEFT's constructors initialise PEFT's own modules.
            visit(
                child,
                f"{name}.{child_name}" if name else child_name,
                None if adapted and child_name != "base_layer" else around,
                set_above,
            )
            for child_name, child in module.named_children()
        ]
        if not own and not any(below):
            return False
        if own and not set_above:
            raise ValueError(
                f"Nothing can compute {', '.join(own)} of {name or 'the model'!r}, {a_or_an(module)}: it has "
                "no reset_parameters(). Give it one, or pass init_fn."
            )
        if initialize is not None:
            chosen.append((module, initialize))
        if own and initialize is not itself and itself is not None and init_fn is None:
            constructors.append((module, itself))
        return True

    visit(model, "", None, False)
    return chosen, constructors


def _reset_lora(kinds: Mapping[str, Any], layer: Any) -> None:
    for adapter in layer.r:
        getattr(layer, RESET_LORA)(adapter, kinds[adapter])


# Properties that an initializer reads of a tensor without its values.
_DESCRIBES = {Tensor.shape.__get__, Tensor.ndim.__get__, Tensor.dtype.__get__, Tensor.requires_grad.__get__}  # type: ignore[attr-defined]
_DESCRIBES |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point}


class _MadeWhole(TorchFunctionMode):
    """Gives an initializer the model's tensors whole, each at its first use, since a parent may set its children's.

    Before, the model has stand-ins on the meta device. `keep` takes this rank's parts of the tensors that were used.
    """

    def __init__(self, known: Mapping[Slot, Tensor], place: torch.device, compute: torch.device) -> None:
        super().__init__()
        self.values: dict[Slot, Tensor] = {}
        self.known, self._place, self._compute = known, place, compute
        self._slots: dict[int, tuple[Slot, bool]] = {}
        self._wholes: dict[int, Tensor] = {}

    def stand_in(self, slot: Slot, kept: bool) -> Tensor:
        """Return a tensor to register in place of the slot's; without `kept`, values written to it are dropped."""
        tensor = torch.empty(slot.tensor.shape, dtype=slot.tensor.dtype, device="meta")
        if slot.is_parameter:
            tensor = nn.Parameter(tensor, requires_grad=slot.tensor.requires_grad)
        vars(tensor).update(vars(slot.tensor))  # marks such as ``_no_reinit``
        if slot in self.known:
            setattr(tensor, INITIALIZED, True)
        self._slots[id(tensor)] = slot, kept
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _DESCRIBES:
            args, kwargs = tree_map_only(Tensor, self._whole, (args, kwargs))
        return func(*args, **kwargs)

    def _whole(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._slots:
            return tensor
        if id(tensor) not in self._wholes:
            slot, kept = self._slots[id(tensor)]
            # Values that an eager build computes on the CPU may differ elsewhere in the last bit; weights are drawn.
            whole = _unset(slot, self._compute if slot.is_parameter else torch.device("cpu"))
            value = self.values.get(slot, self.known.get(slot, slot.tensor))
            if kept and not value.is_meta:
                whole.copy_(value.full_tensor() if isinstance(value, DTensor) else value)  # a collective
            self._wholes[id(tensor)] = whole
        return self._wholes[id(tensor)]

    def keep(self) -> None:
        """Take this rank's parts of the tensors that are whole, and let go of them."""
        for stand_in, whole in self._wholes.items():
            slot, kept = self._slots[stand_in]
            if kept:
                self.put(slot, whole)
        self._wholes.clear()

    def put(self, slot: Slot, whole: Tensor) -> None:
        """Take this rank's part of `whole`, unless the values are known."""
        if slot not in self.known:
            self.values[slot] = _empty(slot, self._place, self._compute)
            copy_whole(self.values[slot], whole)


def _initialize(
    model: nn.Module,
    initializers: Initializers,
    slots: list[Slot],
    made: _MadeWhole,
    tied: bool,
) -> dict[Slot, Tensor]:
    """Return this rank's part of the values that the initializers set; the modules are left as they were.

    tied: a tied tensor is one for the initializers, too. transformers and constructors tie afterwards: the values in
    its first place count.
    """
    before: list[tuple[Slot, dict[str, Any], str, Tensor]] = []
    chosen, constructors = initializers
    try:
        for slot in slots:
            first = made.stand_in(slot, kept=True)
            for at, (module, name) in enumerate(slot.places):
                registered: dict[str, Any] = module._parameters if slot.is_parameter else module._buffers
                before.append((slot, registered, name, registered[name]))
                registered[name] = first if tied or not at else made.stand_in(slot, kept=False)
        with original_classes(model), guarded_initializers(), torch.no_grad():
            for at, (module, initialize) in enumerate([*chosen, *constructors]):
                # If the model around it has no rule for it, its constructor's values stay in an eager build.
                if at < len(chosen) or not any(m is module for slot in made.values for m, _ in slot.places):
                    with made:
                        initialize(module)
                    made.keep()
                    vars(module)[INITIALIZED] = True  # as transformers does: initializers of parents read it
        for slot, registered, name, _ in before:
            if not registered[name].is_meta:  # the initializer registered another tensor
                made.put(slot, registered[name])
    finally:
        for _, registered, name, tensor in before:
            registered[name] = tensor
        for module, _ in chosen:
            vars(module).pop(INITIALIZED, None)
    for slot in (slot for slot in slots if slot not in made.known):
        _refuse_wrong(slot, made.values.get(slot, slot.tensor))
    return made.values


def _unset(slot: Slot, device: torch.device) -> Tensor:
    """A whole tensor in the slot's shape, full of values that no initializer leaves."""
    whole = torch.empty(slot.tensor.shape, dtype=slot.tensor.dtype, device=device)
    if whole.is_floating_point() or whole.is_complex():
        whole.fill_(torch.nan)
    elif whole.dtype != torch.bool:
        whole.fill_(torch.iinfo(whole.dtype).max)
    return nn.Parameter(whole, requires_grad=slot.tensor.requires_grad) if slot.is_parameter else whole


def _refuse_wrong(slot: Slot, value: Tensor) -> None:
    """Refuse a `value` that no initializer set, or that is not the one that the slot's tensor had before."""
    local, before = (t.to_local() if isinstance(t, DTensor) else t for t in (value.detach(), slot.tensor.detach()))
    inexact = local.is_floating_point() or local.is_complex()
    if local.is_meta or (
        local.isnan().any()
        if inexact
        else local.dtype != torch.bool and local.numel() and (local == torch.iinfo(local.dtype).max).all()
    ):
        raise ValueError(f"{slot.name} was not set by its module's initializer: pass an init_fn that sets it.")
    if not before.is_meta and not torch.equal(local.cpu(), before.cpu()):
        raise ValueError(
            f"{slot.name} is not on the meta device, and begins with {before.flatten()[:2].tolist()}, but its module's "
            "initializer would give it other values. If the model's constructor made it (torch.Tensor(n) is memory that was "
            "never written), call model.to('meta') when the model is built, so that it is initialized like the "
            f"others. If you gave it, set {INITIALIZED} = True on each tensor that you gave, so that it is kept."
        )


@contextmanager
def _seeded(seed: int | None, sharded: bool) -> Iterator[None]:
    """The same random numbers on every rank inside, and the generators as they were afterwards."""
    drawn = [int(torch.randint(2**62, ())) if seed is None else seed]
    if sharded and dist.is_initialized():
        dist.broadcast_object_list(drawn, src=0)
    before = rng_state()
    try:
        torch.manual_seed(drawn[0])
        yield
    finally:
        set_rng_state(before)
