"""The first whole step that a plan's model runs, measured, and compared with what was predicted.

A step is whole when the optimizer has its state: the second one, or under DDP the third. It is watched by hooks on the
model and on all optimizers, on rank zero alone, and they are taken out again when it is over.
"""

from __future__ import annotations

import gc
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from nemo_like._util.live_bytes import storages_of
from nemo_like._util.log import logger, warn_once
from nemo_like._util.tensors import describe, tensors_in
from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import Part, Plan
from nemo_like.options.optimizers import OPTIMIZER_OBJECTS, optimizer_word
from nemo_like.profiling.meters import AllocatorEvents

VARIABLE = "NEMO_LIKE_COMPARE_PEAK"
TOLERANCE = 0.03
"""A difference of this share of the prediction is reported."""
_watches: list[_StepWatch] = []
"""Watches that are not over. One hook on all optimizers serves them: torch goes through the hooks while they run, so
that none may take itself out."""
_hook: RemovableHandle | None = None
_NO_CAUSE = (
    "What the loop does is what was planned for; something else is alive, or the plan was made for another set-up."
)
_PATIENCE = 256
"""Forward passes without an optimizer's step after which the watch ends."""


@dataclass
class Seen:
    """The facts of one step of the real loop."""

    forwards: int = 0
    gradients_before: bool = False
    """Some parameter had a gradient when its first forward began."""
    output_kept: bool = False
    own_loss: bool = False
    """The model's output had a loss."""
    optimizer: str = ""
    """In the words of `StepSpec.optimizer`; empty: another one."""
    batch: str = ""


def watch_first_step(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Measure the first whole step of `model` on `device`, and log once where it is not what `plan` predicted.

    Does nothing where the plan has no predicted peak, or was made for another kind of device. On the CPU only where the
    environment variable ``NEMO_LIKE_COMPARE_PEAK`` is 1: the events of its allocator are had from torch's profiler alone,
    and a profiler of the user's own that started in the same step would end the process. With 0, nowhere.
    """
    value = os.environ.get(VARIABLE, "")
    wanted = value == "1" if device.type == "cpu" else value != "0"
    if wanted and plan.peak_bytes and plan.traced_for == device.type:
        _StepWatch(plan, device).install(model)


@dataclass(eq=False)
class _StepWatch:
    plan: Plan
    device: torch.device
    seen: Seen = field(default_factory=Seen)
    over: bool = True
    """Its hooks do nothing: it is done, or is in a copy of the model."""
    handles: list[RemovableHandle] = field(default_factory=list)

    def install(self, model: nn.Module) -> None:
        global _hook
        if _hook is None:
            _hook = register_optimizer_step_post_hook(_after_any_step)
        _watches.append(self)
        self.over = False
        self.model = weakref.ref(model)
        self.steps, self.idle, self.between = 0, 0, True
        self.wait = (
            2 if isinstance(model, DistributedDataParallel) else 1
        )  # DDP makes its buckets anew in the second step
        self.meter: _DevicePeak | AllocatorEvents | None = None
        self.output: list[weakref.ref[torch.Tensor]] = []
        self.handles = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
        ]

    def __deepcopy__(self, memo: object) -> _StepWatch:
        return _StepWatch(self.plan, self.device)

    def __reduce__(self) -> Any:
        return _StepWatch, (self.plan, self.device)

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.over or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.idle += 1
        if self.idle > _PATIENCE:
            self._close()
        elif self.steps >= self.wait:
            if self.between and not any(watch.meter is not None for watch in _watches):  # one model at a time
                self._begin(module)
            self.seen.forwards += 1
            self.seen.batch = describe(tuple(tensors_in((args, kwargs))), {})
        self.between = False

    def _begin(self, module: nn.Module) -> None:
        self.seen.gradients_before = any(p.grad is not None for p in module.parameters())
        gc.collect()  # else what an earlier model left in cycles may be freed within the step, and counted
        meter = AllocatorEvents() if self.device.type == "cpu" else _DevicePeak(self.device)
        try:
            meter.start()
        except RuntimeError as error:  # another profiler is on
            logger.info(f"The first step is not compared with the plan: {str(error).splitlines()[0]}")
            self._close()
            return
        self.meter = meter

    def _after_forward(self, module: nn.Module, args: tuple, output: object) -> None:
        if self.over or self.meter is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        tensors = sorted(tensors_in(output), key=lambda t: t.numel())
        self.output = [weakref.ref(t) for t in tensors[-1:]]
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        self.seen.own_loss = loss is not None or (isinstance(output, torch.Tensor) and output.dim() == 0)

    def after_step(self, optimizer: Optimizer) -> None:
        model = self.model()
        if model is None:
            self._close()
            return
        ours = {id(p) for p in model.parameters()}
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            return
        self.steps, self.idle, self.between = self.steps + 1, 0, True
        meter, self.meter = self.meter, None
        if meter is None:
            self.seen.forwards = 0
            return
        measured = meter.stop()
        self.seen.optimizer = optimizer_word(optimizer)
        self.seen.output_kept = any(ref() is not None for ref in self.output)
        between = bytes_between_steps(model, optimizer, gradients=self.seen.gradients_before)
        between += self.plan.peak.get(Part.REMEMBERED_TABLES, 0)  # of the functions of its code: no tensors
        peak = between + max(measured) if isinstance(measured, list) else measured
        self._close()
        if peak is not None:
            self._compare(peak)

    def _compare(self, peak: int) -> None:
        predicted = self.plan.peak_bytes
        if abs(peak - predicted) <= TOLERANCE * predicted:
            return
        reasons = causes(self.plan.step, self.seen)
        more = "above" if peak > predicted else "below"
        text = (
            f"The first whole step peaked at {write_bytes(peak)} on this rank, {abs(peak - predicted) / predicted:.0%} "
            f"{more} the {write_bytes(predicted)} that was predicted for ac={self.plan.budget!r}. "
        )
        text += f"The likely cause: {'; '.join(reasons)}." if reasons else _NO_CAUSE
        (logger.warning if peak > predicted else logger.info)(text)

    def _close(self) -> None:
        self.over = True
        _watches.remove(self)
        if isinstance(self.meter, AllocatorEvents):
            self.meter.stop()
        for handle in self.handles:
            handle.remove()
        self.handles = []


def _after_any_step(optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    for watch in list(_watches):
        watch.after_step(optimizer)


def causes(planned: Mapping[str, Any], seen: Seen) -> list[str]:
    """Return what the loop does otherwise than `planned` (`Plan.step`), in words, with what to write instead."""
    reasons = []
    if seen.forwards != planned.get("microbatches", seen.forwards):
        reasons.append(
            f"{seen.forwards} forward passes per optimizer step, planned for {planned['microbatches']} "
            f"(StepSpec(microbatches={seen.forwards}))"
        )
    if seen.gradients_before and planned.get("zero_grad") == "free":
        reasons.append("gradients were there before the first forward (StepSpec(zero_grad='zero'), or free them)")
    if seen.output_kept and not planned.get("keeps_output", True):
        reasons.append("the model's output stayed alive through backward (StepSpec(keeps_output=True), or drop it)")
    if not seen.output_kept and planned.get("keeps_output"):
        reasons.append("the model's output was dropped before backward (StepSpec(keeps_output=False))")
    if planned.get("loss") == "model" and not seen.own_loss:
        reasons.append("the loss was computed outside of the model (StepSpec(loss_fn=...), a sample without labels)")
    word = planned.get("optimizer", seen.optimizer)
    if seen.optimizer not in (word, *getattr(OPTIMIZER_OBJECTS.get(word), "forms", ())):
        optimizer = seen.optimizer or "another optimizer"
        reasons.append(f"the step was that of {optimizer}, planned for {planned['optimizer']} (optimizer=...)")
    if seen.batch and planned.get("sample", seen.batch) != seen.batch:
        reasons.append(f"the batch was {seen.batch}, planned for {planned['sample']}")
    return reasons


def bytes_between_steps(model: nn.Module, optimizer: Optimizer, *, gradients: bool) -> int:
    """Bytes that are alive when a step begins: parameters, optimizer state, gradients that stay, DDP's buckets."""
    params = list(model.parameters())
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    grads = [p.grad for p in params if p.grad is not None]
    stay = gradients or isinstance(model, DistributedDataParallel)
    storages = storages_of([*params, *state, *(grads if stay else [])])
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _DevicePeak:
    """The caching allocator's highest mark, which is not reset: it may be from other code."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        self.before = torch.get_device_module(self.device).max_memory_allocated(self.device)

    def stop(self) -> int | None:
        """The peak; None where an earlier one was higher, and hides it."""
        peak = torch.get_device_module(self.device).max_memory_allocated(self.device)
        return peak if peak > self.before else None


# A batch larger than the one that a plan was made for: trained on all the same, and logged once.

_WHOLE = ("torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64")


def size_watch(plan: Plan | None, tokens: int | None) -> SizeWatch | None:
    """Return a watch for a batch that is larger than planned; None: it is not known what was planned for.

    Args:
        plan: made for a sample, whose largest tensor of whole numbers (token ids, labels) counts, or where it has none, the
            largest of all.
        tokens: elements of that tensor; `plan` is asked first.
    """
    sample = "" if plan is None else plan.step.get("sample", "")
    if plan is not None and sample and plan.peak_bytes:
        sizes = _sizes(sample)
        whole = any(dtype in _WHOLE for dtype, _ in sizes)
        most = max((size for dtype, size in sizes if not whole or dtype in _WHOLE), default=0)
        return SizeWatch(sample, most, plan.peak_bytes) if most else None
    return None if tokens is None else SizeWatch(f"{tokens} tokens", tokens)


def most_elements(tensors: Iterable[torch.Tensor]) -> int:
    """Return the elements of the largest tensor of whole numbers (token ids, labels), or where there is none, of the
    largest of all."""
    sizes = [(str(t.dtype) in _WHOLE, t.numel()) for t in tensors]
    whole = any(is_whole for is_whole, _ in sizes)
    return max((size for is_whole, size in sizes if is_whole or not whole), default=0)


def warn_of_larger_batches(model: nn.Module, watch: SizeWatch) -> None:
    """Warn once, on rank zero, when `model` trains on more than was planned for. Nothing else changes: gradients do not
    depend on a plan."""
    model.register_forward_pre_hook(watch.before_forward, with_kwargs=True)


@dataclass(eq=False)
class SizeWatch:
    """Logs once that a batch is larger than the one that memory was planned for."""

    planned: str
    """Description of what was planned for, for people."""
    most: int
    """See `most_elements`."""
    peak_bytes: int = 0
    """Peak that was predicted; 0: only the caller knows."""
    over: bool = False

    def __deepcopy__(self, memo: object) -> SizeWatch:
        return SizeWatch(self.planned, self.most, self.peak_bytes, self.over)

    def __reduce__(self) -> Any:
        return SizeWatch, (self.planned, self.most, self.peak_bytes)

    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
            self.see((args, kwargs))

    def see(self, batch: object, microbatches: int = 1) -> None:
        """A batch that is trained on, as so many micro-batches of equally many rows."""
        if self.over:
            return
        tensors = tuple(tensors_in(batch))
        if most_elements(tensors) <= self.most * microbatches:
            return
        self.over = True  # the hook is not taken out here: torch goes through the hooks just now
        peak = f"the predicted peak of {write_bytes(self.peak_bytes)}" if self.peak_bytes else "was predicted"
        each = f" in each of {microbatches} micro-batches" if microbatches > 1 else ""
        warn_once(
            f"A batch is larger than the one that the plan was made for ({describe(tensors, {})}; planned: "
            f"{self.planned}{each}). It is trained on as it is, and takes more than {peak}. Plan for the "
            "largest batch: give it as sample_input=, or its length as --max-seq-len of nemo-like fit."
        )


def _sizes(described: str) -> list[tuple[str, int]]:
    """(dtype, number of elements) of each tensor in the words of `describe`.

    >>> _sizes("int64 (2, 64), float32 (3,)")
    [('torch.int64', 128), ('torch.float32', 3)]
    """
    sizes = []
    for dtype, shape in re.findall(r"(\w+) \(([\d, ]*)\)", described):
        size = 1
        for length in filter(None, (part.strip() for part in shape.split(","))):
            size *= int(length)
        sizes.append((f"torch.{dtype}", size))
    return sizes
