"""MemoryProfiler: real runs of a model, watched layer by layer, as a report; and the layers that a budget requires."""

import contextlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from nemo_like._util.device_work import wait_for
from nemo_like._util.live_bytes import DeviceBytes, storages_of
from nemo_like._util.log import say_once
from nemo_like._util.module_tree import check_model
from nemo_like._util.rng import random_numbers_put_back
from nemo_like._util.table import grouped, totals
from nemo_like._util.tensors import tensors_in
from nemo_like._util.words import check_whole
from nemo_like.distributed.launch import checked_device, current_device
from nemo_like.fake.model_copy import model_copy
from nemo_like.fake.outside_state import context_variables_put_back
from nemo_like.layers import Layer, LayersNotFoundError, find_layers
from nemo_like.profiling.measured_step import LossFn, clock_for, counter_of, spread, step_loss, zero_gradients
from nemo_like.profiling.profile_report import MB, LayerProfile, Moment, ProfiledCall, ProfileReport, enough_layers
from nemo_like.torch_compat import left_to_python, tree_map

OUTSIDE = -1  # In the place of a call: embedding, head and loss.


class StepEvent(NamedTuple):
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
        self.events: list[StepEvent] = []
        self.sizes: dict[int, int] = {}  # Bytes of the storages that calls were passed or that were saved, by number.
        # Calls that saved a storage, and calls that were passed it.
        self.savers, self.takers = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        self._running = [OUTSIDE]
        self._earliest = OUTSIDE  # In backward: the earliest call that has begun.
        self._device, self._clock, self._counted = device, clock_for(device), counted
        self._counter = counter_of(model, sample)
        self._meter = self._counter if device.type == "cpu" else DeviceBytes(device)
        with contextlib.ExitStack() as stack:
            if counted:
                state = storages_of([*model.parameters(), *model.buffers()])
                self._ignored = set(map(self._counter.identify, state))
                stack.enter_context(self._meter)
                saved = partial(self._note, self.savers)
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor))
            with contextlib.ExitStack() as hooks:  # gone in backward: a layer that runs there is no call
                for index, layer in enumerate(layers):
                    hooks.enter_context(layer.register_forward_pre_hook(partial(self._before, index), with_kwargs=True))
                    hooks.enter_context(layer.register_forward_hook(self._after))
                self._event("model", 0)
                loss = step_loss(model, sample, loss_fn)
            self._earliest = len(self.calls)
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
        firsts = ((first, self.sizes[number]) for number, (first, *_) in self.savers.items())
        return totals((OUTSIDE if first == OUTSIDE else self.calls[first], size) for first, size in firsts)

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
        if self._counted:
            self.events.append(StepEvent(phase, call, 0.0, self._meter.live, self._meter.take_peak()))
        else:
            wait_for(self._device)
            self.events.append(StepEvent(phase, call, self._clock()))

    def _before(self, layer: int, module: nn.Module, args: object, kwargs: object) -> None:
        call = len(self.calls)
        self.calls.append(layer)
        self._running.append(call)
        _on_gradient((args, kwargs), partial(self._leave, call))
        if self._counted:
            self._note(self.takers, (args, kwargs))
        self._event("forward", call)

    def _after(self, module: nn.Module, args: object, output: object) -> None:
        call = self._running.pop()
        _on_gradient(output, partial(self._enter, call))
        self._event("model", call + 1)

    def _enter(self, call: int, gradient: torch.Tensor) -> None:
        if call < self._earliest:
            self._earliest = call
            self._event("backward", call)

    def _leave(self, call: int, gradient: torch.Tensor) -> None:
        if call == self._earliest:
            self._event("model", call)

    @left_to_python
    def _note(self, calls: dict[int, list[int]], value: Any) -> Any:
        """Note the running call at the storages of `value`, which is returned: it is the hook of saved tensors, too."""
        for storage in storages_of(value):
            number = self._counter.identify(storage)
            if number not in self._ignored:
                self.sizes[number] = storage.nbytes()
                calls[number].append(self._running[-1])
        return value


def _on_gradient(value: object, hook: Callable[[torch.Tensor], None]) -> None:
    for tensor in tensors_in(value):
        if tensor.requires_grad:
            tensor.register_hook(hook)


class BudgetUnmeetableError(ValueError):
    """A recompute of all layers does not meet the budget; the message states the peak that is left."""


class MemoryProfiler:
    """Measures the bytes that each layer of a model saves for backward, and its times.

    >>> block = lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> profiler = MemoryProfiler(nn.Sequential(block(), block()), "cpu")
    >>> report = profiler.profile(torch.zeros(4, 8), num_runs=1)
    >>> [(row.name, row.activation_bytes) for row in report]  # (4, 8) + 2 x (4, 32), float32; and without the input
    [('0', 1152), ('1', 1152)]
    """

    def __init__(
        self,
        model: nn.Module,
        device: str | torch.device | None = None,
        *,
        layers: Iterable[str | nn.Module] | None = None,
        loss_fn: LossFn | None = None,
    ) -> None:
        """Prepare; nothing is run or changed.

        Args:
            model: a model on `device`; as it is before and after every profile.
            device: ``"cpu"`` or a CUDA device; None: where the model's parameters are.
            layers: names (FQN globs) or modules to measure; None: the model's repeated layers, or, where it has none,
                its children.
            loss_fn: makes a scalar of the model's output; None: its ``loss``, or the sum of its tensors.

        Raises:
            ValueError: the model is not on `device`, or on a device that cannot be measured.
            LayersNotFoundError: `layers` names something that the model does not have.
        """
        check_model(model)
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn is {loss_fn!r}; it must be a function of the model's output, or None.")
        places = {parameter.device for parameter in model.parameters()}
        self._device = _device(device, places, type(model).__name__)
        self._model = model
        self._layers = _layers_to_measure(model, layers)
        self._loss_fn = loss_fn
        self.report: ProfileReport | None = None  # The last profile.

    def profile(self, sample_input: object, num_runs: int = 3) -> ProfileReport:
        """Run forward and backward once for bytes and `num_runs` times for times, after one run to warm up.

        Args:
            sample_input: one batch: a tensor, a tuple (by position) or a mapping (by keyword); moved to the device.
            num_runs: >= 1.

        Raises:
            ValueError: `num_runs` < 1; nothing in the output has a gradient; or a run called none of the layers.
        """
        check_whole("num_runs", num_runs, 1)
        sample = tree_map(lambda leaf: leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf, sample_input)
        model = model_copy(self._model, runs_kernels=True).train()
        copies = dict(zip(self._model.modules(), model.modules()))
        zero_gradients(model)  # and not None: accumulating gradients then costs the same in every run
        run = (model, [copies[layer.module] for layer in self._layers], sample, self._loss_fn, self._device)
        with random_numbers_put_back(self._device), context_variables_put_back(), torch.enable_grad():
            step_loss(model, sample, self._loss_fn).backward()  # first-call costs are not a layer's
            step = LayerTrace(*run, counted=True)  # bytes are the same in every run
            timed = [LayerTrace(*run, counted=False) for _ in range(num_runs)]
        if not step.calls:
            raise ValueError(
                f"A step of {type(self._model).__name__} called none of the layers "
                f"{', '.join(layer.fqn for layer in self._layers[:5])}; name the ones that it calls with layers=."
            )
        self.report = self._report(step, timed)
        return self.report

    def recommend_layers(self, memory_budget_mb: float) -> list[str]:
        """Return layers to recompute so that the peak of activations fits: those that free most per measured time.

        Nothing is in it that is not needed: leaving out any of its layers misses the budget.

        Args:
            memory_budget_mb: MB (10**6 bytes) that the step's activations may take at their peak, beyond parameters,
                gradients, buffers and inputs (`ProfileReport.peak_bytes`).

        Returns:
            Layer names in the model's order; empty where the budget is met without.

        Raises:
            RuntimeError: nothing has been profiled yet.
            ValueError: the budget is not a number above zero.
            BudgetUnmeetableError: all layers recomputed do not meet it; the message has the peak that is left.
        """
        if self.report is None:
            raise RuntimeError("Nothing has been profiled yet; call profile(sample_input) first.")
        report = self.report
        if (
            isinstance(memory_budget_mb, bool)
            or not isinstance(memory_budget_mb, int | float)
            or not memory_budget_mb > 0
        ):
            raise ValueError(f"memory_budget_mb is {memory_budget_mb!r}; it must be a number of MB above 0.")
        chosen = enough_layers(report.moments, report.calls, int(memory_budget_mb * MB))
        if chosen is None:
            useful = [name for name in report.call_names if report[name].freed_bytes > 0]
            best = report.predict_peak_bytes(useful)
            raise BudgetUnmeetableError(
                f"No recompute of whole layers keeps the activations within {memory_budget_mb} MB: recomputing all "
                f"{len(useful)} layers leaves a peak of {best / MB:.3f} MB (without checkpointing: "
                f"{report.peak_bytes / MB:.3f} MB). Use a smaller batch or shorter sequences, or more devices."
            )
        return [report.call_names[index] for index in chosen]

    def _report(self, step: LayerTrace, timed: list[LayerTrace]) -> ProfileReport:
        saved, freed = step.saved_bytes(), step.freed_bytes()
        times = [trace.seconds_of() for trace in timed]
        called, rows = Counter(step.calls), dict[int, LayerProfile]()
        for index in sorted(called):
            layer = self._layers[index]
            forward, backward = (
                [1000 * seconds[index, phase] for seconds in times] for phase in ("forward", "backward")
            )
            rows[index] = LayerProfile(
                name=layer.fqn,
                kind=type(layer.module).__name__,
                calls=called[index],
                activation_bytes=saved[index],
                freed_bytes=sum(freed[call] for call, other in enumerate(step.calls) if other == index),
                forward_ms=statistics.median(forward),
                backward_ms=statistics.median(backward),
                spread=max(spread(forward), spread(backward)),
            )
        # Layers of one class that free the same bytes do the same work: one cost, so that noise does not decide.
        kinds = {index: (row.kind, row.freed_bytes, row.calls) for index, row in rows.items()}
        times_of = grouped((kinds[index], row.forward_ms / row.calls) for index, row in rows.items())
        costs = {kind: statistics.median(each) for kind, each in times_of.items()}
        stretches = list(pairwise(step.events))
        moments = tuple(Moment(event.call, following.peak) for event, following in stretches)
        growth = {event.call: following.peak - event.live for event, following in stretches if event.phase == "forward"}
        live = {event.call: event.live for event, _ in stretches if event.phase == "backward"}
        numbers, steps = list(rows), [1000 * trace.seconds for trace in timed]
        calls = tuple(
            ProfiledCall(
                layer=numbers.index(index),
                freed=freed[call],
                cost=costs[kinds[index]],
                recompute_peak=live.get(call, 0) - freed[call] + growth[call],
            )
            for call, index in enumerate(step.calls)
        )
        return ProfileReport(
            model=type(self._model).__name__,
            device=str(self._device),
            runs=len(timed),
            layers=tuple(sorted(rows.values(), key=lambda row: -row.activation_bytes)),
            outside_bytes=saved[OUTSIDE],
            peak_bytes=max(moment.peak for moment in moments),
            step_ms=statistics.median(steps),
            step_spread=spread(steps),
            moments=moments,
            calls=calls,
            call_names=tuple(row.name for row in rows.values()),
        )


def _device(wanted: str | torch.device | None, places: set[torch.device], model: str) -> torch.device:
    device = checked_device(next(iter(places), "cpu") if wanted is None else wanted)
    if device.type != "cpu" and device.index is None:
        device = current_device(device.type)
    if places - {device}:
        raise ValueError(
            f"device is {str(device)!r}, but the {model} has parameters on {', '.join(sorted(map(str, places)))}; move all "
            "of the model to one device first."
        )
    return device


def _layers_to_measure(model: nn.Module, layers: Iterable[str | nn.Module] | None) -> tuple[Layer, ...]:
    try:
        return find_layers(model, layers)
    except LayersNotFoundError:
        if layers is not None or not any(True for _ in model.children()):
            raise
    say_once(
        f"The {type(model).__name__} has no repeated layers to profile; measuring its children one by one.",
        key=f"profile-children-{type(model).__name__}",
    )
    return tuple(_children(model, ""))


def _children(module: nn.Module, prefix: str) -> Iterator[Layer]:
    """The direct children, lists of modules opened."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield Layer(prefix + name, child, "other")
