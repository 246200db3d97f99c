"""Everything around a region that steers its results and is not an argument: taken at forward, put back for recomputation.

Random numbers, context variables, autocast, the choice of SDPA back end, a replaced
`F.scaled_dot_product_attention`, function modes (a context-parallel patch, ``with torch.device(...)``), default dtype,
deterministic algorithms, float32 precision. Other packages add theirs with `register`. Values that are as they were cost a
comparison and no more.
"""

import contextvars
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from operator import is_
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_like._util.plain import is_plain
from nemo_like._util.rng import accelerator_type
from nemo_like.activation_checkpointing.engine.buffers import BufferSnapshot
from nemo_like.activation_checkpointing.engine.containers import is_kind_of_container, map_leaves
from nemo_like.activation_checkpointing.engine.dispatch import ForwardMode, look_on
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.engine.hooks import hook_calls
from nemo_like.activation_checkpointing.engine.inputs import SavedInputs
from nemo_like.activation_checkpointing.engine.module_state import ModuleState, module_of
from nemo_like.activation_checkpointing.engine.random_state import Generators, learned_of
from nemo_like.torch_compat import (
    SDP_KERNELS,
    SWITCH_READERS,
    function_modes,
    sdp_priority,
    set_sdp_priority,
    unseen,
    without_function_modes,
)

Restore = Callable[[], AbstractContextManager[Any]]
Capture = Callable[[], Restore | None]

_registered: dict[str, Capture] = {}


def register(name: str, capture: Capture) -> None:
    """Make a state of your own part of the state that forward and recomputation share.

    `capture` runs at the start of every region's forward. It returns None (nothing to keep), or a function that
    makes a context manager; recomputation runs within that. Raises ValueError for a name that is taken.
    """
    if name in _registered:
        raise ValueError(f"global_state.register: {name!r} is taken; use another name.")
    _registered[name] = capture


class _State(NamedTuple):
    """The state that is compared in one go."""

    sdpa: Any
    sdpa_priority: list[int]
    modes: tuple[Any, ...]
    autocast_cache: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]  # Device, whether it is on, and its dtype


def _state(device: str | None) -> _State:
    devices = ("cpu",) if device is None else ("cpu", device)
    return _State(
        F.scaled_dot_product_attention,
        sdp_priority(),
        function_modes(),
        torch.is_autocast_cache_enabled(),
        tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in devices),
    )


class GlobalState:
    """One snapshot of it all, of the moment of its creation.

    `generators`: those that operators are given. None: random numbers are left as they are, and dropout differs between
    forward and recomputation.
    """

    __slots__ = ("_cpu_rng", "_device", "_device_rng", "_extras", "_flags", "_state", "generators", "variables")

    def __init__(self, generators: Generators | None) -> None:
        self._device = device = accelerator_type()
        self._flags = read_switches(device)
        self._state = _state(device)
        self.variables = ContextVariables()
        self._extras = tuple([restore for capture in _registered.values() if (restore := capture()) is not None])
        self.generators = generators
        self._cpu_rng = torch.get_rng_state() if generators is not None else None
        on_device = generators is not None and device is not None
        self._device_rng = torch.get_device_module(device).get_rng_state() if on_device else None

    def forget_unused_rng(self) -> None:
        """Call at the end of forward: drops the random-number state if no number was drawn meanwhile."""
        with unseen():
            if self._cpu_rng is not None and torch.equal(self._cpu_rng, torch.get_rng_state()):
                self._cpu_rng = None
        if self._device_rng is not None:
            now = torch.get_device_module(self._device).get_rng_state()
            if torch.equal(self._device_rng, now):
                self._device_rng = None

    def restore(self, stack: ExitStack) -> None:
        """Make everything as it was, until `stack` ends."""
        for restore in self._extras:
            stack.enter_context(restore())
        self._restore_rng(stack)
        if read_switches(self._device) != self._flags:
            put_back(switches_for(self._device), self._flags, stack)
        now = _state(self._device)
        # Autocast is entered even where nothing differs: backward may run outside every autocast region, and then the
        # cache of cast weights must be emptied again at the end.
        if now != self._state or any(enabled for _, enabled, _ in self._state.autocast):
            self._restore_state(now, stack)

    def _restore_rng(self, stack: ExitStack) -> None:
        if self.generators is not None:
            self.generators.restore(stack)  # before torch's own, one of which may be among them, noted later than entry
        if self._cpu_rng is not None:
            stack.callback(torch.set_rng_state, torch.get_rng_state())
            torch.set_rng_state(self._cpu_rng)
        if self._device_rng is not None:
            module = torch.get_device_module(self._device)
            stack.callback(module.set_rng_state, module.get_rng_state())
            module.set_rng_state(self._device_rng)

    def _restore_state(self, now: _State, stack: ExitStack) -> None:
        if now.sdpa is not self._state.sdpa:
            stack.callback(setattr, F, "scaled_dot_product_attention", now.sdpa)
            F.scaled_dot_product_attention = self._state.sdpa
        order = self._state.sdpa_priority
        if now.sdpa_priority != order:
            stack.callback(set_sdp_priority, now.sdpa_priority)
            set_sdp_priority(order)
        if len(now.modes) != len(self._state.modes) or not all(map(is_, now.modes, self._state.modes)):
            stack.enter_context(without_function_modes())
            for mode in self._state.modes:
                stack.enter_context(mode)
        for (device, enabled, dtype), (_, enabled_now, _) in zip(self._state.autocast, now.autocast):
            if enabled or enabled_now:
                cache = self._state.autocast_cache
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))


# Context variables: recomputation runs in the context of forward, and the values it sets or collects there are dropped.
#
# The value of a variable is saved as a region's arguments are: tensors saved by autograd, containers as they were. So a
# list in which forward collects something (as transformers collects hidden states) gets nothing a second time.

_BUILT_IN = (list, dict, set)


class ContextVariables:
    """The context at the moment of creation."""

    __slots__ = ("_context", "_empty", "_held", "_saved")

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._held: tuple[contextvars.ContextVar[Any], ...] = ()
        # Variables with an empty container, and its type: torch's compiler leaves some in every context.
        self._empty: list[tuple[contextvars.ContextVar[Any], type]] = []
        held = {}
        for variable, value in self._context.items():
            if is_kind_of_container(value.__class__):
                if not value and type(value) in _BUILT_IN:
                    self._empty.append((variable, type(value)))
                elif type(value) is not tuple or not all(map(is_plain, map(type, value))):  # which cannot change
                    held[variable] = value
            elif isinstance(value, Tensor):
                held[variable] = value
        if held:
            self._held = tuple(held)
            self._saved = SavedInputs(map_leaves(_without_graph, tuple(held.values())), {})
            self._context.run(_set, self._held, [None] * len(held))  # else they would be in memory twice

    def run(self, region: str, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Call `function` in a copy of the context; raises RegionError if a tensor in it was changed in place."""
        context = self._context.copy()
        for variable, kind in self._empty:
            context.run(variable.set, kind())
        if self._held:
            context.run(_set, self._held, self._saved.get(region)[0])
        return context.run(function, *args, **kwargs)


def _without_graph(leaf: object) -> Any:
    # A region that keeps the graph of a tensor which an earlier call of it put there would never be freed.
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _set(variables: tuple[contextvars.ContextVar[Any], ...], values: list[Any]) -> None:
    for variable, value in zip(variables, values):
        variable.set(value)


# torch's global switches that decide in which type operators compute, and by which kernels, those of SDPA among them.

# A function that reads a switch, and one that sets it to the value read.
Switch = tuple[Callable[[], Any], Callable[[Any], None]]

_backends: Any = torch.backends


def _attributes(owner: object, *names: str) -> list[Switch]:
    return [(partial(getattr, owner, name), partial(setattr, owner, name)) for name in names]


def _named(name: str, read: Callable[[], Any]) -> Switch:
    """Return a switch that is not put back: which of torch's functions was used to set it is not known."""

    def put(value: object) -> None:
        raise RegionError(
            f"{name} was {value} in forward, and is {read()} in backward, so recomputation would compute other numbers. "
            "Set it before the step."
        )

    return read, put


_ALWAYS: list[Switch] = [
    *((SWITCH_READERS[kind], getattr(_backends.cuda, f"enable_{kind}_sdp")) for kind in SDP_KERNELS.values()),
    (torch.get_default_dtype, torch.set_default_dtype),
    _named("torch.use_deterministic_algorithms", SWITCH_READERS["deterministic"]),
    _named("warn_only of torch.use_deterministic_algorithms", SWITCH_READERS["warn_only"]),
    _named("float32's precision in matmuls", lambda: _backends.cuda.matmul.fp32_precision),
    _named("float32's precision in oneDNN's matmuls", lambda: _backends.mkldnn.matmul.fp32_precision),
    (SWITCH_READERS["mkldnn"], partial(setattr, _backends.mkldnn, "enabled")),
]
_ON_CPU_AND_CUDA: list[Switch] = [
    *_ALWAYS,
    *_attributes(_backends.cudnn, "enabled", "benchmark", "deterministic"),
    _named("float32's precision in convolutions", lambda: _backends.cudnn.conv.fp32_precision),
    *_attributes(
        _backends.cuda.matmul,
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ),
]


def switches_for(device: str | None) -> list[Switch]:
    """Return the switches that exist; those of CUDA's libraries only where `device` is ``"cuda"``."""
    return _ON_CPU_AND_CUDA if device == "cuda" else _ALWAYS


def read_switches(device: str | None) -> list[Any]:
    """Return the value of each switch of `switches_for`."""
    return [read() for read, _ in switches_for(device)]


def put_back(switches: list[Switch], wanted: list[Any], stack: ExitStack) -> None:
    """Set `switches` to the values `wanted`, until `stack` ends.

    Raises:
        RegionError: for one that is not put back.
    """
    for (read, put), value in zip(switches, wanted):
        now = read()
        if now != value:
            put(value)
            stack.callback(put, now)


# Transformer Engine's choice of an attention back end, made in recomputation as in forward (NeMo Automodel#3330).

# Modules, newest first, whose `_attention_backends` dict caches the attention back end that was chosen last.
_TE_ATTENTION = (
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",
    "transformer_engine.pytorch.attention",
)


def attention_back_end() -> Restore | None:
    """Recomputation chooses as forward did: the cache is put back as forward found it (NeMo Automodel#3330).

    Only where Transformer Engine has been imported; its cache is private, and absent means nothing to keep.
    """
    for name in _TE_ATTENTION:
        cache = getattr(sys.modules.get(name), "_attention_backends", None)
        if isinstance(cache, dict):
            return partial(patch.dict, cache, dict(cache), clear=True)
    return None


# All that steers the results of one call and is not an argument: noted in forward, put back for its recomputation.


class Surroundings:
    """The state of the module that `function` is, or is a method of, and of the program, at the moment of creation."""

    def __init__(self, function: Any, preserve_rng_state: bool) -> None:
        module, self._learned = module_of(function), learned_of(function)
        self._module = ModuleState(module) if module is not None else None
        self._buffers = BufferSnapshot(self._module, self._learned) if self._module is not None else None
        self._hooks = hook_calls(self._module.walk.owns[: self._module.walk.count]) if self._module else None
        self._global_state = GlobalState(Generators() if preserve_rng_state else None)
        # Makes the context that the function runs in, in recomputation.
        self.looker: Callable[[], AbstractContextManager[Any]] = nullcontext

    def in_forward(
        self, region: Any, mode: ForwardMode | None, inputs: SavedInputs | None
    ) -> AbstractContextManager[Any]:
        """Return the context that the function of a `region` runs in, in forward; see `look_on`."""
        look, self.looker = look_on(mode, self._global_state.generators, inputs, self._learned)
        stack = ExitStack()
        if self._hooks is not None:
            stack.enter_context(self._hooks.in_forward(region))
        stack.enter_context(mode or look or nullcontext())
        return stack

    def forward_done(self) -> bool:
        """Keep only the state that the call used or changed. Returns whether recomputation gets copies of buffers."""
        self._global_state.forget_unused_rng()
        if self._buffers is not None and not self._buffers.forward_done():
            self._buffers = None
        if self._module is not None:
            self._module.forward_done()
        return self._buffers is not None

    def restore(self, stack: ExitStack, region: Any) -> None:
        """Make everything as it was, until `stack` ends.

        Raises:
            RegionError: something was changed that cannot be put back.
        """
        if self._module is not None:
            self._module.check(region.name, self._buffers.puts_back if self._buffers is not None else lambda *_: False)
            self._module.restore(stack)
        if self._buffers is not None:
            self._buffers.restore(stack)
        self._global_state.restore(stack)
        if self._hooks is not None:
            stack.enter_context(self._hooks.in_recomputation(region))

    def check_again(self, region: str) -> None:
        """Raise RegionError where the recomputation has changed state that is not put back."""
        if self._module is not None:
            self._module.check_signs(region, "a second time, in recomputation")

    def run(self, region: str, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Call `function` with the context variables that forward found."""
        return self._global_state.variables.run(region, function, *args, **kwargs)
