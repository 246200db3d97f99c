"""One forward and backward of a model, watched layer by layer: saved bytes, live bytes, times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nemo_like._util.device_work import wait_for
from nemo_like._util.live_bytes import DeviceBytes, LiveBytes, storages_of
from nemo_like._util.tensors import tensors_in
from nemo_like.profiling.profile_report import Moment
from nemo_like.torch_compat import left_to_python

LossFn = Callable[[Any], torch.Tensor]


class Clock:
    """Marks in the device's own time: its events, so that nothing is synchronised, or the CPU's clock."""

    def __init__(self, device: torch.device) -> None:
        self._events = None if device.type == "cpu" else torch.get_device_module(device)

    def mark(self) -> Any:
        if self._events is None:
            return time.perf_counter()
        event = self._events.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start: Any, end: object) -> float:
        """From `start` to `end`; on a device the work between them must have finished (synchronise first)."""
        return float(start.elapsed_time(end)) if self._events is not None else (end - start) * 1000


def watch_step(
    model: nn.Module,
    layers: Sequence[nn.Module],
    sample: object,
    loss_fn: LossFn | None,
    listener: _ByteListener | _TimeListener,
) -> None:
    """Run one forward and backward and tell `listener` of every layer call, by hooks that are gone afterwards.

    Calls are numbered in forward order; everything outside a call is the model's own.

    In backward, a call begins when the gradient of one of its outputs is there. It ends when the gradient of one of its
    inputs is there, or when the call before it begins.
    """
    handles, state = [], _Position()
    try:
        for index, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(_before(index, state, listener), with_kwargs=True))
            handles.append(layer.register_forward_hook(_after(state, listener)))
        loss = _loss(model, run_model(model, sample), loss_fn)
        state.backward_at = state.calls
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Position:
    calls: int = 0
    running: list[int] = field(default_factory=list)
    # In backward: the earliest call that has begun. A layer that runs now is recomputation, not a call of its own.
    backward_at: int | None = None


def _before(layer: int, state: _Position, listener: _ByteListener | _TimeListener) -> Callable[..., None]:
    def hook(module: nn.Module, args: object, kwargs: object) -> None:
        if state.backward_at is not None:
            return
        call = state.calls
        state.calls += 1
        state.running.append(call)

        def gradient_arrived(_: torch.Tensor) -> None:
            if state.backward_at == call:
                listener.backward_leaves(call)

        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad:
                tensor.register_hook(gradient_arrived)
        listener.forward_begins(call, layer, (args, kwargs))

    return hook


def _after(state: _Position, listener: _ByteListener | _TimeListener) -> Callable[..., None]:
    def hook(module: nn.Module, args: object, output: object) -> None:
        if state.backward_at is not None:
            return
        call = state.running.pop()

        def gradient_arrived(_: torch.Tensor) -> None:
            if state.backward_at is not None and call < state.backward_at:
                state.backward_at = call
                listener.backward_enters(call)

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(gradient_arrived)
        listener.forward_ends(call)

    return hook


def run_model(model: nn.Module, sample: object) -> Any:
    """`model` called on `sample`: a mapping by keyword, a tuple or list by position, anything else as one argument."""
    if isinstance(sample, Mapping):
        return model(**sample)
    return model(*sample) if isinstance(sample, tuple | list) else model(sample)


def _loss(model: nn.Module, output: object, loss_fn: LossFn | None) -> torch.Tensor:
    """`loss_fn` of the output; else the output's own ``loss``; else the sum of every output that has a gradient."""
    if loss_fn is not None:
        result = loss_fn(output)
        if not isinstance(result, torch.Tensor) or result.numel() != 1 or not result.requires_grad:
            raise ValueError(f"loss_fn returned {result!r}; it must return a tensor of one number that has a gradient.")
        return result
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    parts = [tensor.sum() for tensor in tensors_in(output) if tensor.requires_grad]
    if not parts:
        raise ValueError(
            f"{type(model).__name__} returned nothing that requires a gradient, so no backward can be measured; "
            "let at least one parameter train, or pass loss_fn."
        )
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


@dataclass
class CallBytes:
    """The tensors that one call of one layer saved and was given: storages by number, with their bytes."""

    layer: int
    inputs: dict[int, int]
    saved: dict[int, int] = field(default_factory=dict)  # First saved in this call.
    touched: set[int] = field(default_factory=set)  # Saved in this call, first or not.
    recompute_growth: int = 0  # Rise of the live bytes above those at its start while it ran forward.
    live_in_backward: int = 0  # Live bytes when its backward begins.


@dataclass
class StepBytes:
    """The bytes of one step."""

    calls: list[CallBytes]
    outside: dict[int, int]  # Storages first saved outside every layer (embedding, head, loss).
    outside_touched: set[int]
    moments: list[Moment]


class _ByteListener:
    def __init__(self, counter: LiveBytes, meter: LiveBytes | DeviceBytes, ignored: set[int]) -> None:
        self._counter, self._meter, self._ignored = counter, meter, ignored
        self._seen: set[int] = set()
        self._running: int | None = None
        self._calls_before = self._live_at_start = 0
        self.step = StepBytes([], {}, set(), [])

    def next_moment(self, calls_before: int) -> int:
        """End the current stretch; the next one has `calls_before`. Returns the peak of the stretch that ended."""
        peak = self._meter.take_peak()
        self.step.moments.append(Moment(self._calls_before, peak))
        self._calls_before = calls_before
        return peak

    def forward_begins(self, call: int, layer: int, arguments: object) -> None:
        self.next_moment(call)
        inputs = {
            number: storage.nbytes()
            for storage in storages_of(arguments)
            if (number := self._counter.identify(storage)) not in self._ignored
        }
        self.step.calls.append(CallBytes(layer, inputs))
        self._running = call
        self._live_at_start = self._meter.live

    def forward_ends(self, call: int) -> None:
        self.step.calls[call].recompute_growth = self.next_moment(call + 1) - self._live_at_start
        self._running = None

    def backward_enters(self, call: int) -> None:
        self.next_moment(call)
        self.step.calls[call].live_in_backward = self._meter.live

    def backward_leaves(self, call: int) -> None:
        """The stretch goes on: work before the next call counts with this one."""

    @left_to_python
    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """The pack hook: counts, and keeps the tensor as it is."""
        for storage in storages_of(tensor):
            number = self._counter.identify(storage)
            if number in self._ignored:
                continue
            call = None if self._running is None else self.step.calls[self._running]
            (self.step.outside_touched if call is None else call.touched).add(number)
            if number not in self._seen:
                self._seen.add(number)
                (self.step.outside if call is None else call.saved)[number] = storage.nbytes()
        return tensor


def counter_of(model: nn.Module, sample: object) -> LiveBytes:
    """Return a counter of the bytes that a step makes beyond the model, its gradients and the sample."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return LiveBytes([*model.parameters(), *model.buffers(), *gradients, *tensors_in(sample)])


def trace_bytes(
    model: nn.Module, layers: Sequence[nn.Module], sample: object, loss_fn: LossFn | None, device: torch.device
) -> StepBytes:
    """One step, with every saved storage and the live bytes recorded. Its times would mean nothing."""
    counter = counter_of(model, sample)
    meter = counter if device.type == "cpu" else DeviceBytes(device)
    state = storages_of([*model.parameters(), *model.buffers()])
    listener = _ByteListener(counter, meter, set(map(counter.identify, state)))
    with meter, torch.autograd.graph.saved_tensors_hooks(listener.saved, lambda tensor: tensor):
        watch_step(model, layers, sample, loss_fn, listener)
        listener.next_moment(0)
    return listener.step


@dataclass
class CallTimes:
    """Milliseconds of one call of one layer."""

    layer: int
    forward_ms: float = 0.0
    backward_ms: float = 0.0


class _TimeListener:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.layers: list[int] = []
        self.spans: list[tuple[str, int, Any, Any]] = []
        self._open: tuple[str, int, Any] | None = None

    def turn(self, phase: str | None = None, call: int = -1) -> None:
        """End the span timed until now, and begin to time `phase` of a call; None: work that belongs to no call."""
        now = self._clock.mark()
        if self._open is not None:
            self.spans.append((*self._open, now))
        self._open = None if phase is None else (phase, call, now)

    def forward_begins(self, call: int, layer: int, arguments: object) -> None:
        self.layers.append(layer)
        self.turn("forward_ms", call)

    def forward_ends(self, call: int) -> None:
        self.turn()

    def backward_enters(self, call: int) -> None:
        self.turn("backward_ms", call)

    def backward_leaves(self, call: int) -> None:
        self.turn()


def trace_times(
    model: nn.Module, layers: Sequence[nn.Module], sample: object, loss_fn: LossFn | None, device: torch.device
) -> tuple[list[CallTimes], float]:
    """One step, timed: each layer call, and the whole step in milliseconds."""
    clock = Clock(device)
    listener = _TimeListener(clock)
    with contextlib.ExitStack() as stack:
        if device.type != "cpu":
            stack.enter_context(torch.get_device_module(device).device(device))
        start = clock.mark()
        watch_step(model, layers, sample, loss_fn, listener)
        listener.turn()
        end = clock.mark()
        wait_for(device)
    calls = [CallTimes(layer) for layer in listener.layers]
    for phase, call, begin, finish in listener.spans:
        setattr(calls[call], phase, getattr(calls[call], phase) + clock.milliseconds(begin, finish))
    return calls, clock.milliseconds(start, end)


def warm_up(model: nn.Module, sample: object, loss_fn: LossFn | None) -> None:
    """One unwatched step: first-call costs (library start-up, lazy caches of the model) are not a layer's own."""
    _loss(model, run_model(model, sample), loss_fn).backward()
