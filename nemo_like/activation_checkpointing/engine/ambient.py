"""Everything around a region that steers its results and is not an argument: taken at forward, put back for recomputation.

Random numbers (torch's, Python's, NumPy's, a generator of one's own), context variables, autocast, the choice of SDPA
back end, a replaced `F.scaled_dot_product_attention`, function modes (a context-parallel patch,
``with torch.device(...)``), default dtype, deterministic algorithms, float32 precision. Other packages add theirs with
`register`. Values that are as they were cost a comparison and no more.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from operator import call, is_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_like.activation_checkpointing.engine.deep_state import is_container, is_plain, map_leaves
from nemo_like.activation_checkpointing.engine.inputs import SavedInputs
from nemo_like.activation_checkpointing.engine.random_state import Generators, HostRandom
from nemo_like.torch_compat import (
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
    """Make a state of your own part of what forward and recomputation share.

    `capture` runs at the start of every region's forward. It returns None (nothing to keep), or a function that
    makes a context manager; recomputation runs within that. Raises ValueError for a name that is taken.

    >>> register("my-flag", lambda: None)
    >>> unregister("my-flag")
    """
    if name in _registered:
        raise ValueError(f"ambient.register: {name!r} is taken; use another name, or unregister it first.")
    _registered[name] = capture


def unregister(name: str) -> None:
    """Take back `register`; raises KeyError for an unknown name."""
    del _registered[name]


class _State(NamedTuple):
    """The state that is compared in one go."""

    sdpa: Any
    sdpa_priority: list[int]
    modes: tuple[Any, ...]
    autocast_cache: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """Device, whether it is on, and its dtype"""
    autocasts: bool


def _state(device: str | None) -> _State:
    cpu = torch.is_autocast_enabled("cpu")
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = (("cpu", cpu, torch.get_autocast_dtype("cpu")),)
    if device is not None:
        autocast += ((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),)
    return _State(
        F.scaled_dot_product_attention,
        sdp_priority(),
        function_modes(),
        torch.is_autocast_cache_enabled(),
        autocast,
        cpu or autocast[-1][1],
    )


def accelerator_type() -> str | None:
    """The accelerator that is in use by this process (``"cuda"``, ...), or None. Never initialises one."""
    if torch.cuda.is_initialized():
        return "cuda"
    other = _other_accelerator()
    initialized = getattr(torch.get_device_module(other), "is_initialized", None) if other is not None else None
    return other if initialized is not None and initialized() else None


@functools.cache  # what a machine has doesn't change, and this is asked for every region
def _other_accelerator() -> str | None:
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if current is None or current.type == "cuda" else current.type


RngState = tuple[torch.Tensor, str | None, torch.Tensor | None] | tuple[torch.Generator, torch.Tensor]


def rng_state(generator: torch.Generator | None = None) -> RngState:
    """The random-number state of the CPU and of the accelerator in use, or of `generator`."""
    if generator is not None:
        return generator, generator.get_state()
    device = accelerator_type()
    return torch.get_rng_state(), device, torch.get_device_module(device).get_rng_state() if device else None


def set_rng_state(state: RngState) -> None:
    """Go back, or on, to what `rng_state` returned."""
    if len(state) == 2:
        state[0].set_state(state[1])
        return
    cpu, device, on_device = state
    torch.set_rng_state(cpu)
    if device is not None and on_device is not None:
        torch.get_device_module(device).set_rng_state(on_device)


class Ambient:
    """One snapshot of it all, of the moment of its creation.

    `preserve_rng_state=False` leaves the random-number state out: dropout then differs between forward and recomputation.
    """

    __slots__ = (
        "_cpu_rng",
        "_device",
        "_device_rng",
        "_extras",
        "_flags",
        "_host_random",
        "_state",
        "generators",
        "variables",
    )

    def __init__(self, preserve_rng_state: bool = True) -> None:
        self._device = device = accelerator_type()
        self._flags = read_switches(device)
        self._state = _state(device)
        self.variables = ContextVariables()
        self._extras = tuple([restore for capture in _registered.values() if (restore := capture()) is not None])
        self._cpu_rng = torch.get_rng_state() if preserve_rng_state else None
        self._device_rng = torch.get_device_module(device).get_rng_state() if preserve_rng_state and device else None
        self._host_random: HostRandom | None = HostRandom() if preserve_rng_state else None
        self.generators: Generators | None = Generators() if preserve_rng_state else None
        """The states of the region's own generators, as they are found; None: random numbers are left as they are."""

    def forget_unused_rng(self) -> None:
        """Call at the end of forward: drops the random-number state if no number was drawn meanwhile."""
        with unseen():
            if self._cpu_rng is not None and torch.equal(self._cpu_rng, torch.get_rng_state()):
                self._cpu_rng = None
        if self._device_rng is not None:
            now = torch.get_device_module(self._device).get_rng_state()
            if torch.equal(self._device_rng, now):
                self._device_rng = None
        if self._host_random is not None and not self._host_random.forget_unused():
            self._host_random = None
        if self.generators is not None and not self.generators.forget_unused():
            self.generators = None

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Make everything as it was, until `stack` ends."""
        for restore in self._extras:
            stack.enter_context(restore())
        self._restore_rng(stack)
        if read_switches(self._device) != self._flags:
            put_back(switches_for(self._device), self._flags, stack)
        now = _state(self._device)
        # Autocast is entered even where nothing differs: backward may run outside every autocast region, and then the
        # cache of cast weights must be emptied again at the end.
        if now != self._state or self._state.autocasts:
            self._restore_sdpa(now, stack)
            self._restore_modes(now, stack)
            self._restore_autocast(now, stack)

    def _restore_rng(self, stack: contextlib.ExitStack) -> None:
        if self._host_random is not None:
            self._host_random.restore(stack)
        if self.generators is not None:
            self.generators.restore(stack)  # before torch's own, one of which may be among them, noted later than entry
        if self._cpu_rng is not None:
            stack.callback(torch.set_rng_state, torch.get_rng_state())
            torch.set_rng_state(self._cpu_rng)
        if self._device_rng is not None:
            module = torch.get_device_module(self._device)
            stack.callback(module.set_rng_state, module.get_rng_state())
            module.set_rng_state(self._device_rng)

    def _restore_sdpa(self, now: _State, stack: contextlib.ExitStack) -> None:
        if now.sdpa is not self._state.sdpa:
            stack.callback(setattr, F, "scaled_dot_product_attention", now.sdpa)
            F.scaled_dot_product_attention = self._state.sdpa
        order = self._state.sdpa_priority
        if now.sdpa_priority != order:
            stack.callback(set_sdp_priority, now.sdpa_priority)
            set_sdp_priority(order)

    def _restore_modes(self, now: _State, stack: contextlib.ExitStack) -> None:
        if len(now.modes) == len(self._state.modes) and all(map(is_, now.modes, self._state.modes)):
            return
        stack.enter_context(without_function_modes())
        for mode in self._state.modes:
            stack.enter_context(mode)

    def _restore_autocast(self, now: _State, stack: contextlib.ExitStack) -> None:
        for (device, enabled, dtype), (_, enabled_now, _) in zip(self._state.autocast, now.autocast):
            if enabled or enabled_now:
                cache = self._state.autocast_cache
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))


# --- Transformer Engine -------------------------------------------------------------------------------------------

_TE_ATTENTION = (
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",
    "transformer_engine.pytorch.attention",
)
"""Modules, newest first, whose `_attention_backends` dict caches the attention back end that was chosen last."""


def _transformer_engine_attention_cache() -> Restore | None:
    """Recomputation chooses as forward did: the cache is put back as forward found it (NeMo Automodel#3330).

    Only where Transformer Engine has been imported; its cache is private, and absent means nothing to keep.
    """
    for name in _TE_ATTENTION:
        cache = getattr(sys.modules.get(name), "_attention_backends", None)
        if isinstance(cache, dict):
            entries = dict(cache)
            return lambda: _dict_contents(cache, entries)
    return None


@contextlib.contextmanager
def _dict_contents(target: dict[Any, Any], contents: dict[Any, Any]) -> Iterator[None]:
    present = dict(target)
    target.clear()
    target.update(contents)
    try:
        yield
    finally:
        target.clear()
        target.update(present)


register("transformer-engine attention back end", _transformer_engine_attention_cache)


# Context variables: recomputation runs in the context that forward ran in, and what it sets or collects there is dropped.
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
        self._empty: list[tuple[contextvars.ContextVar[Any], type]] = []
        """Variables with an empty container, and its type: torch's compiler leaves some in every context."""
        held = {}
        for variable, value in self._context.items():
            if is_container(value):
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


# torch's global switches that decide in what type operators compute, and by which kernels, those of SDPA among them.

Switch = tuple[Callable[[], Any], Callable[[Any], None]]
"""A function that reads a switch, and one that sets it to what was read."""

_backends: Any = torch.backends
SDPA_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


def _attributes(owner: object, *names: str) -> list[Switch]:
    def switch(name: str) -> Switch:
        return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)

    return [switch(name) for name in names]


def _precision(old: Switch, backends: list[Any]) -> Switch:
    """torch has two sets of names for float32's precision. After the newer one was used, asking by the older one raises."""

    def read() -> Any:
        try:
            return old[0]()
        except RuntimeError:
            return [backend.fp32_precision for backend in backends]

    def put(value: object) -> None:
        if not isinstance(value, list):
            old[1](value)
            return
        for backend, wanted in zip(backends, value):
            if backend.fp32_precision != wanted:
                backend.fp32_precision = wanted

    return read, put


def _put_deterministic(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=SWITCH_READERS["warn_only"]())


def _put_warn_only(value: bool) -> None:
    torch.use_deterministic_algorithms(SWITCH_READERS["deterministic"](), warn_only=value)


_ALWAYS: list[Switch] = [
    *((SWITCH_READERS[kind], getattr(_backends.cuda, f"enable_{kind}_sdp")) for kind in SDPA_KERNELS),
    (torch.get_default_dtype, torch.set_default_dtype),
    (SWITCH_READERS["deterministic"], _put_deterministic),
    (SWITCH_READERS["warn_only"], _put_warn_only),
    _precision(
        (SWITCH_READERS["matmul_precision"], torch.set_float32_matmul_precision),
        [_backends.cuda.matmul, _backends.mkldnn.matmul],
    ),
    (SWITCH_READERS["mkldnn"], lambda value: setattr(_backends.mkldnn, "enabled", value)),
]
_ON_CUDA: list[Switch] = [
    *_attributes(_backends.cudnn, "enabled", "benchmark", "deterministic"),
    _precision(
        _attributes(_backends.cudnn, "allow_tf32")[0],
        [_backends.cudnn.conv, _backends.cudnn.rnn],
    ),
    *_attributes(
        _backends.cuda.matmul,
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ),
]
_ON_CPU_AND_CUDA = _ALWAYS + _ON_CUDA


_READ_ALWAYS = [read for read, _ in _ALWAYS]
_READ_ON_CPU_AND_CUDA = [read for read, _ in _ON_CPU_AND_CUDA]


def switches_for(device: str | None) -> list[Switch]:
    """Return the switches that exist; those of CUDA's libraries only where `device` is ``"cuda"``."""
    return _ON_CPU_AND_CUDA if device == "cuda" else _ALWAYS


def read_switches(device: str | None) -> list[Any]:
    """Return what each of `switches_for` reads."""
    return list(map(call, _READ_ON_CPU_AND_CUDA if device == "cuda" else _READ_ALWAYS))


def put_back(switches: list[Switch], wanted: list[Any], stack: ExitStack) -> None:
    """Set what was read as `wanted`, until `stack` ends."""
    for (read, put), value in zip(switches, wanted):
        now = read()
        if now != value:
            stack.callback(put, now)
            put(value)
