"""Everything around a region that steers its results and is no argument: taken at forward, put back for replay.

Random numbers (torch's, Python's, NumPy's, a generator of one's own), context variables, autocast, the choice of SDPA
back end, a replaced `F.scaled_dot_product_attention`, function modes (a context-parallel patch,
``with torch.device(...)``), default dtype, deterministic algorithms, float32 precision. Other packages add theirs with
`register`. Values that are as they were cost a comparison and no more.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from nemo_like.activation_checkpointing.engine.context_variables import ContextVariables
from nemo_like.activation_checkpointing.engine.cpu_random import CpuRandom, State
from nemo_like.activation_checkpointing.engine.flags import put_back, read_switches, switches_for
from nemo_like.activation_checkpointing.engine.generators import Generators
from nemo_like.activation_checkpointing.engine.host_random import HostRandom
from nemo_like.torch_compat import function_modes, sdp_priority, set_sdp_priority, without_function_modes

Restore = Callable[[], AbstractContextManager[Any]]
Capture = Callable[[], Restore | None]

_registered: dict[str, Capture] = {}


def register(name: str, capture: Capture) -> None:
    """Make a state of your own part of what forward and replay share.

    `capture` runs at the start of every region's forward. It returns None (nothing to keep), or a function that
    makes a context manager; replay runs within that. Raises ValueError for a name that is taken.

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
    """What is compared in one go."""

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
        F.scaled_dot_product_attention, sdp_priority(), function_modes(), torch.is_autocast_cache_enabled(), autocast,
        cpu or autocast[-1][1],
    )  # fmt: skip


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


_cpu_random = functools.cache(CpuRandom)


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

    `preserve_rng_state=False` leaves the random-number state out: dropout then differs between forward and replay.
    """

    __slots__ = (
        "_cpu_rng", "_device", "_device_rng", "_extras", "_flags", "_host_random", "_state", "generators", "variables",
    )  # fmt: skip

    def __init__(self, preserve_rng_state: bool = True) -> None:
        self._device = device = accelerator_type()
        self._flags = read_switches(device)
        self._state = _state(device)
        self.variables = ContextVariables()
        self._extras = tuple([restore for capture in _registered.values() if (restore := capture()) is not None])
        self._cpu_rng: State | None = _cpu_random().now() if preserve_rng_state else None
        self._device_rng = torch.get_device_module(device).get_rng_state() if preserve_rng_state and device else None
        self._host_random: HostRandom | None = HostRandom() if preserve_rng_state else None
        self.generators: Generators | None = Generators() if preserve_rng_state else None
        """Those of the region's own, as they are found; None: random numbers are left as they are."""

    def forget_unused_rng(self) -> None:
        """Call at the end of forward: drops the random-number state if no number was drawn meanwhile."""
        if self._cpu_rng is not None and _cpu_random().is_at(self._cpu_rng):
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
            torch.set_rng_state(self._cpu_rng[1])
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
    """Replay chooses as forward did: the cache is put back as forward found it (NeMo Automodel#3330).

    Only where Transformer Engine has been imported by somebody; its cache is private, and absent means nothing to keep.
    """
    for name in _TE_ATTENTION:
        cache = getattr(sys.modules.get(name), "_attention_backends", None)
        if isinstance(cache, dict):
            found = dict(cache)
            return lambda: _dict_contents(cache, found)
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
