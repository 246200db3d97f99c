"""One forward and backward of a model, watched layer by layer: saved bytes and live bytes, or times."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from nemo_like._util.device_work import wait_for
from nemo_like._util.live_bytes import DeviceBytes, LiveBytes, storages_of
from nemo_like._util.tensors import tensors_in
from nemo_like.profiling.measured_step import LossFn, clock_for, counter_of, step_loss
from nemo_like.torch_compat import left_to_python

OUTSIDE = -1  # In the place of a call: embedding, head and loss.


class Event(NamedTuple):
    """A place in the step at which a stretch of it begins."""

    phase: str  # ``forward`` or ``backward`` of a call, or ``model``: outside of every call.
    call: int  # The call; of ``model`` the number of calls whose saved bytes are alive.
    seconds: float  # Where times are measured, which counting would lengthen.
    live: int = 0  # Bytes alive, where those are counted.
    peak: int = 0  # The most bytes alive at one time since the event before.


class LayerTrace:
    """One step of a model: every call of a layer, in forward order, and the events at which calls begin and end.

    In backward, a call begins when the gradient of one of its outputs is there. It ends when the gradient of one of its
    inputs is there, or when the call before it begins.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        sample: object,
        loss_fn: LossFn | None,
        device: torch.device,
        *,
        counted: bool,
    ) -> None:
        """Run the step; the hooks of `layers` are gone afterwards.

        Args:
            counted: bytes are counted; the times mean nothing then.
        """
        self.calls: list[int] = []  # The layer of each.
        self.events: list[Event] = []
        self.sizes: dict[int, int] = {}  # Bytes of the storages that calls were passed or that were saved, by number.
        # Calls that saved a storage, and calls that were passed it.
        self.savers, self.takers = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        self._running = [OUTSIDE]
        # In backward: the earliest call that has begun. A layer that runs now is recomputation, not a call of its own.
        self._backward_at: int | None = None
        self._device, self._clock = device, clock_for(device)
        self._counter: LiveBytes | None = None
        with contextlib.ExitStack() as stack:
            if counted:
                self._counter = counter_of(model, sample)
                self._meter = self._counter if device.type == "cpu" else DeviceBytes(device)
                state = storages_of([*model.parameters(), *model.buffers()])
                self._ignored = set(map(self._counter.identify, state))
                stack.enter_context(self._meter)
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor))
            for index, layer in enumerate(layers):
                stack.enter_context(layer.register_forward_pre_hook(partial(self._before, index), with_kwargs=True))
                stack.enter_context(layer.register_forward_hook(self._after))
            self._event("model", 0)
            loss = step_loss(model, sample, loss_fn)
            self._backward_at = len(self.calls)
            loss.backward()
            self._event("model", 0)

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.events[-1].seconds - self.events[0].seconds

    def seconds_of(self) -> dict[tuple[int, str], float]:
        """Return the seconds of each layer, by its number and the phase."""
        seconds = defaultdict[tuple[int, str], float](float)
        for event, following in pairwise(self.events):
            if event.phase != "model":
                seconds[self.calls[event.call], event.phase] += following.seconds - event.seconds
        return seconds

    def saved_bytes(self) -> Counter[int]:
        """Return the bytes that each layer, or `OUTSIDE`, saves, each storage at the one that saves it first."""
        saved = Counter[int]()
        for number, (first, *_) in self.savers.items():
            saved[OUTSIDE if first == OUTSIDE else self.calls[first]] += self.sizes[number]
        return saved

    def freed_bytes(self) -> Counter[int]:
        """By call: bytes of storages that it alone saved and was not passed, less inputs that nothing else keeps.

        Arguments that several calls share (masks, position tables) live through the forward anyway.
        """
        freed = Counter[int]()
        for number, size in self.sizes.items():
            savers, takers = set(self.savers.get(number, ())), set(self.takers.get(number, ()))
            if len(savers) == 1 and not savers & takers:
                freed[savers.pop()] += size
            elif not savers and len(takers) == 1:
                freed[takers.pop()] -= size
        return freed

    def _event(self, phase: str, call: int) -> None:
        if self._counter is None:
            wait_for(self._device)
            self.events.append(Event(phase, call, self._clock()))
        else:
            self.events.append(Event(phase, call, 0.0, self._meter.live, self._meter.take_peak()))

    def _before(self, layer: int, module: nn.Module, args: object, kwargs: object) -> None:
        if self._backward_at is not None:
            return
        call = len(self.calls)
        self.calls.append(layer)
        self._running.append(call)
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._leave, call))
        if self._counter is not None:
            self._note(self.takers, (args, kwargs))
        self._event("forward", call)

    def _after(self, module: nn.Module, args: object, output: object) -> None:
        if self._backward_at is not None:
            return
        call = self._running.pop()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._enter, call))
        self._event("model", call + 1)

    def _enter(self, call: int, gradient: torch.Tensor) -> None:
        if self._backward_at is not None and call < self._backward_at:
            self._backward_at = call
            self._event("backward", call)

    def _leave(self, call: int, gradient: torch.Tensor) -> None:
        if self._backward_at == call:
            self._event("model", call)

    @left_to_python
    def _saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """The pack hook: counts, and keeps the tensor as it is."""
        self._note(self.savers, tensor)
        return tensor

    def _note(self, calls: dict[int, list[int]], value: object) -> None:
        assert self._counter is not None
        for storage in storages_of(value):
            number = self._counter.identify(storage)
            if number not in self._ignored:
                self.sizes[number] = storage.nbytes()
                calls[number].append(self._running[-1])
