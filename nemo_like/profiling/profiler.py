"""MemoryProfiler: real runs of a model, condensed into a report, and the layers that a budget requires."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import nn

from nemo_like._util.log import say_once
from nemo_like._util.module_tree import check_model
from nemo_like._util.words import check_whole
from nemo_like.distributed.launch import checked_device, current_device
from nemo_like.fake.model_copy import model_copy, random_numbers_put_back
from nemo_like.fake.outside_state import context_variables_put_back
from nemo_like.layers import Layer, LayersNotFoundError, find_layers
from nemo_like.profiling.layer_trace import OUTSIDE, LayerTrace
from nemo_like.profiling.measured_step import LossFn, spread, step_loss
from nemo_like.profiling.profile_report import MB, LayerProfile, Moment, ProfiledCall, ProfileReport, enough_layers
from nemo_like.torch_compat import tree_map


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
        for parameter in model.parameters():
            # Zeros rather than None: accumulating gradients then costs the same in every run.
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
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
        return recommend(self.report, memory_budget_mb)

    def _report(self, step: LayerTrace, timed: list[LayerTrace]) -> ProfileReport:
        saved, freed = step.saved_bytes(), step.freed_bytes()
        times = [trace.seconds_of() for trace in timed]
        called, rows = Counter(step.calls), dict[int, LayerProfile]()
        for index in sorted(called):
            layer = self._layers[index]
            forward = [1000 * seconds[index, "forward"] for seconds in times]
            backward = [1000 * seconds[index, "backward"] for seconds in times]
            rows[index] = LayerProfile(
                name=layer.fqn,
                kind=type(layer.module).__name__,
                calls=called[index],
                activation_bytes=saved[index],
                freed_bytes=sum(freed[call] for call, other in enumerate(step.calls) if other == index),
                forward_ms=statistics.median(forward),
                backward_ms=statistics.median(backward),
                forward_spread=spread(forward),
                backward_spread=spread(backward),
            )
        # Layers of one class that free the same bytes do the same work: one cost, so that noise does not decide.
        alike = defaultdict[tuple[str, int, int], list[float]](list)
        for row in rows.values():
            alike[row.kind, row.freed_bytes, row.calls].append(row.forward_ms / row.calls)
        moments, growth, live = [], Counter[int](), Counter[int]()
        for event, following in pairwise(step.events):
            moments.append(Moment(event.call, following.peak))
            if event.phase == "forward":
                growth[event.call] = following.peak - event.live
            elif event.phase == "backward":
                live[event.call] = event.live
        calls, numbers = [], list(rows)
        for call, index in enumerate(step.calls):
            row = rows[index]
            cost = statistics.median(alike[row.kind, row.freed_bytes, row.calls])
            recompute_peak = live[call] - freed[call] + growth[call]
            calls.append(ProfiledCall(numbers.index(index), freed[call], cost, recompute_peak))
        steps = [1000 * trace.seconds for trace in timed]
        return ProfileReport(
            model=type(self._model).__name__,
            device=str(self._device),
            runs=len(timed),
            layers=tuple(sorted(rows.values(), key=lambda row: -row.activation_bytes)),
            outside_bytes=saved[OUTSIDE],
            peak_bytes=max(moment.peak for moment in moments),
            step_ms=statistics.median(steps),
            step_spread=spread(steps),
            moments=tuple(moments),
            calls=tuple(calls),
            call_names=tuple(row.name for row in rows.values()),
        )


def recommend(report: ProfileReport, memory_budget_mb: float) -> list[str]:
    """`MemoryProfiler.recommend_layers` for a report at hand."""
    if isinstance(memory_budget_mb, bool) or not isinstance(memory_budget_mb, int | float) or not memory_budget_mb > 0:
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


def _device(wanted: str | torch.device | None, places: set[torch.device], model: str) -> torch.device:
    if len(places) > 1:
        raise ValueError(f"{model} has parameters on {', '.join(sorted(map(str, places)))}; it must be on one device.")
    device = checked_device(wanted) if wanted is not None else next(iter(places), torch.device("cpu"))
    if device.type != "cpu" and not hasattr(torch.get_device_module(device), "max_memory_allocated"):
        raise ValueError(
            f"device is {str(device)!r}; a profile needs a device that counts its bytes: 'cpu', or a CUDA device."
        )
    if device.type != "cpu" and device.index is None:
        device = current_device(device.type)
    if places and places != {device}:
        raise ValueError(f"device is {str(device)!r}, but the {model} is on {places.pop()}; move the model first.")
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
    return tuple(Layer(name, child, "other") for name, child in _children(model, ""))


def _children(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """The direct children by name, lists of modules opened."""
    children = []
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            children += _children(child, f"{prefix}{name}.")
        else:
            children.append((prefix + name, child))
    return children
