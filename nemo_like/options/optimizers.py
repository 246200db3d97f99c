"""The optimizers: one object each, with all that is read of one. On one rank it stores its state and the temporaries of
its step (of torch's: ``torch/optim/adam.py``, torch 2.13)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported where an optimizer is made
    import torch
    from torch import nn

# An attribute of models: bitsandbytes keeps 32-bit states for embeddings, as a Trainer tells it (`create_optimizer`).
WIDE_EMBEDDINGS = "nemo_like_wide_embeddings"
_COUNTER = 4  # Bytes of AdamW's counter of steps.
# Sizes of 8-bit states: values that share a scale, and elements from which on a parameter has them.
QUANTIZED_BLOCK, SMALLEST_QUANTIZED = 256, 4096


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter that an optimizer steps."""

    shape: tuple[int, ...]  # Shape of the whole parameter.
    elements: int  # On this rank, padding included.
    itemsize: int
    in_layer: bool = False  # It belongs to a layer: not embedding, last norm or head.
    wide: bool = False  # Its states are in float32 where those of others are in 8 bits.

    @property
    def size(self) -> int:
        """Bytes on this rank."""
        return self.elements * self.itemsize

    @property
    def by_muon(self) -> bool:
        """Muon takes the matrices of layers; AdamW steps all else (Jordan et al., ``KellerJordan/Muon``)."""
        return self.in_layer and len(self.shape) == 2


@dataclass(frozen=True)
class StepTemporaries:
    """Bytes that one pass over parameters makes and drops."""

    # Bytes for each parameter, while it is stepped alone. The last one stays until the next parameter has made its
    # first, or, unless `hands_over`, all of its own.
    alone: tuple[tuple[int, ...], ...] = ()
    together: tuple[int, ...] = ()  # Bytes that are there at one time, one of each parameter.
    hands_over: bool = False

    @property
    def most(self) -> int:
        """The most of them at one time."""
        largest, before = sum(self.together), 0
        for sizes in self.alone:
            total = sum(sizes)
            largest = max(largest, before + sizes[0], total) if self.hands_over else max(largest, before + total)
            before = sizes[-1]
        return largest


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes on one rank."""

    states: tuple[tuple[int, ...], ...]  # The tensors of each parameter's state.
    passes: tuple[StepTemporaries, ...] = ()  # One after the other.

    @cached_property
    def state(self) -> int:
        """All of the state."""
        return sum(map(sum, self.states))

    @cached_property
    def step(self) -> int:
        """Most that the step's temporaries take."""
        return max((each.most for each in self.passes), default=0)


# Function that returns the memory of these parameters, in the optimizer's order, on a device of this kind.
Memory = Callable[[Sequence[TrainedParameter], str], OptimizerMemory]


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about an optimizer. To add one, add an object to `OPTIMIZERS`."""

    name: str
    memory: Memory
    # Times that a step goes over the bytes of the parameters, in one kernel. AdamW in full precision reads parameter,
    # gradient and two moments, and writes all but the gradient. Muon's matmuls are not in it.
    passes: float = 7.0
    # The same on the CPU; None: `passes`. AdamW runs one kernel after the other there: weight decay 2, first moment 3,
    # second 2 and 3, root 2, division 2, epsilon 2, update 4 (``_single_tensor_adam`` of ``torch/optim/adam.py``).
    host_passes: float | None = None
    # Torch's own, for parameters on the CPU; None: torch brings none.
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    forms: tuple[str, ...] = ()  # Words of its possible forms, where torch decides by the device.
    lighter: str | None = None  # The word of one that trains as well with less state.

    def form_on(self, device: str) -> str:
        """Return the word of the form that torch takes on this kind of device: foreach but on the CPU, also for DTensors."""
        return self.forms[device != "cpu"] if self.forms else self.name


def optimizer_memory(trained: Sequence[TrainedParameter], name: str, *, device: str) -> OptimizerMemory:
    """The memory of an optimizer on one rank.

    Args:
        trained: the parameters, in the optimizer's order.
        name: a key of `OPTIMIZERS`.
        device: the kind that the parameters are on: on ``cuda``, torch steps with ``foreach`` where it is not set.
    """
    return OPTIMIZERS[name].memory(trained, device)


@dataclass(frozen=True)
class UpdateInBackward:
    """The step of one parameter by an optimizer of its own (`StepSpec.in_backward`)."""

    optimizer: str
    device: str  # Kind of device that the parameter is on.

    def temporaries(self, param: TrainedParameter) -> int:
        """Return the most bytes that the step of `param` makes and drops."""
        return _temporaries_of_one(self, param)


@cache
def _temporaries_of_one(update: UpdateInBackward, param: TrainedParameter) -> int:
    return optimizer_memory([param], update.optimizer, device=update.device).step


def _adamw(passes: Callable[[Sequence[TrainedParameter]], tuple[StepTemporaries, ...]], fused: bool = False) -> Memory:
    """Two moments, and for each parameter a counter of steps, a float32, which only a fused step has on another device than
    the CPU; `passes`: a step's temporaries."""

    def memory(trained: Sequence[TrainedParameter], device: str) -> OptimizerMemory:
        counter = (_COUNTER,) if device == "cpu" or fused else ()
        return OptimizerMemory(tuple((p.size, p.size, *counter) for p in trained), passes(trained))

    return memory


def _one_by_one(trained: Sequence[TrainedParameter]) -> tuple[StepTemporaries, ...]:
    """Two of one parameter, and, from the second on, the last one of the parameter before."""
    return (StepTemporaries(alone=tuple((p.size, p.size) for p in trained)),)


def _all_at_once(trained: Sequence[TrainedParameter]) -> tuple[StepTemporaries, ...]:
    return (StepTemporaries(together=tuple(p.size for p in trained)),)


_LOOP, _FOREACH = _adamw(_one_by_one), _adamw(_all_at_once)


def _as_torch_builds_it(trained: Sequence[TrainedParameter], device: str) -> OptimizerMemory:
    return (_LOOP if device == "cpu" else _FOREACH)(trained, device)


def _of_states(state: Callable[[TrainedParameter], tuple[int, ...]]) -> Memory:
    return lambda trained, device: OptimizerMemory(tuple(map(state, trained)))


def _quantized(count: int) -> Memory:
    """`count` states of one byte per value and a float32 scale per 256, from 4096 elements on, else float32 (Dettmers et
    al., arXiv 2110.02861; ``min_8bit_size`` and block size of bitsandbytes). torchao's keeps parameters that 256 does not
    divide as they are, and a table of 1 KiB for each state.

    Of paged ones all bytes count: they are on the device until it is full.
    """

    def state(param: TrainedParameter) -> tuple[int, ...]:
        if param.wide or param.elements < SMALLEST_QUANTIZED:
            return (4 * param.elements,) * count
        return (param.elements,) * count + (4 * -(-param.elements // QUANTIZED_BLOCK),) * count

    return _of_states(state)


def _in_float32(count: int) -> Memory:
    """`count` states in float32, for parameters of any dtype (``optim_bits=32`` of bitsandbytes)."""
    return _of_states(lambda param: (4 * param.elements,) * count)


def _one_state(copies: int) -> Memory:
    """One state and a counter as AdamW's; a step makes one copy of a parameter, with ``foreach`` so many of each
    (``rmsprop.py`` and ``adagrad.py`` of ``torch/optim``)."""

    def memory(trained: Sequence[TrainedParameter], device: str) -> OptimizerMemory:
        on_cpu = device == "cpu"
        loop, foreach = tuple((p.size,) for p in trained), tuple(copies * p.size for p in trained)
        temporaries = StepTemporaries(alone=loop) if on_cpu else StepTemporaries(together=foreach)
        return OptimizerMemory(tuple((p.size, *((_COUNTER,) if on_cpu else ())) for p in trained), (temporaries,))

    return memory


def _adafactor(trained: Sequence[TrainedParameter], device: str) -> OptimizerMemory:
    """transformers' (``optimization.py``): in float32 a row and a column of each matrix, and a number. A step makes two
    copies of one parameter, and where that is not float32 also one of it and one of its gradient."""

    def state(p: TrainedParameter) -> tuple[int, ...]:
        if len(p.shape) < 2:
            return 4 * p.elements, _COUNTER
        return 4 * p.elements // p.shape[-1], 4 * p.elements // p.shape[-2], _COUNTER

    copies = tuple((4 * p.elements,) * (2 if p.itemsize == 4 else 4) for p in trained)
    return OptimizerMemory(tuple(map(state, trained)), (StepTemporaries(alone=copies),))


def _with_muon(trained: Sequence[TrainedParameter], device: str) -> OptimizerMemory:
    """`torch.optim.Muon` for the matrices of layers, AdamW for all else, one after the other.

    Its state is one momentum; its step holds an update of one matrix and, in bfloat16, two of its iterates and three
    products of the shorter side. Ranks that shard a matrix are taken to gather it whole.
    """
    rest = _as_torch_builds_it([p for p in trained if not p.by_muon], device)
    states = iter(rest.states)
    muon = StepTemporaries(tuple(_orthogonalized(p) for p in trained if p.by_muon), hands_over=True)
    return OptimizerMemory(tuple((p.size,) if p.by_muon else next(states) for p in trained), (muon, *rest.passes))


def _orthogonalized(param: TrainedParameter) -> tuple[int, ...]:
    """Return the bytes of one matrix: the update, the products beyond the two iterates, and the iterates. The
    last one stays."""
    short = min(param.shape)
    update, iterate, product = math.prod(param.shape) * param.itemsize, 2 * math.prod(param.shape), 2 * short * short
    # Either the products of one round and the next iterate, or those of two rounds, in which the next one begins.
    return update, max(iterate + 2 * product, 3 * product), iterate


def _torchs(name: str, **settings: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        import torch

        kind: type[torch.optim.Optimizer] = getattr(torch.optim, name)
        return kind(parameters, lr=1e-4, **settings)  # type: ignore[call-arg]

    return make


OPTIMIZERS: dict[str, OptimizerFacts] = {
    facts.name: facts
    for facts in (
        OptimizerFacts(
            "adamw",
            _as_torch_builds_it,
            host_passes=20.0,
            make=_torchs("AdamW", foreach=False),
            forms=("adamw-loop", "adamw-foreach"),
            lighter="adamw-8bit",
        ),
        OptimizerFacts(
            "adamw-loop", _LOOP, host_passes=20.0, make=_torchs("AdamW", foreach=False), lighter="adamw-8bit"
        ),
        OptimizerFacts(
            "adamw-foreach", _FOREACH, host_passes=20.0, make=_torchs("AdamW", foreach=True), lighter="adamw-8bit"
        ),
        OptimizerFacts(
            "adamw-fused",
            _adamw(lambda trained: (), fused=True),
            make=_torchs("AdamW", fused=True),
            lighter="adamw-8bit",
        ),
        OptimizerFacts("adamw-32bit", _in_float32(2), lighter="adamw-8bit"),
        OptimizerFacts("adamw-8bit", _quantized(2), passes=4.0),
        # Both moments in two bytes (DeepSeek-V3, arXiv 2412.19437, section 3.3), stepped by a fused kernel.
        OptimizerFacts("adamw-bf16", _of_states(lambda p: (2 * p.elements, 2 * p.elements)), passes=5.0),
        # Three moments (Pagliardini et al., arXiv 2409.03137), of which two are read and written as one.
        OptimizerFacts("ademamix", _in_float32(3), passes=9.0, lighter="ademamix-8bit"),
        OptimizerFacts("ademamix-8bit", _quantized(3), passes=4.5),
        OptimizerFacts("lion", _in_float32(1), passes=5.0, lighter="lion-8bit"),
        OptimizerFacts("lion-8bit", _quantized(1), passes=3.5),
        OptimizerFacts("rmsprop", _one_state(1), passes=5.0, lighter="rmsprop-8bit"),
        OptimizerFacts("rmsprop-32bit", _in_float32(1), passes=5.0, lighter="rmsprop-8bit"),
        OptimizerFacts("rmsprop-8bit", _quantized(1), passes=3.5),
        OptimizerFacts("adagrad", _one_state(2), passes=5.0),
        OptimizerFacts("adafactor", _adafactor),
        OptimizerFacts("muon", _with_muon),
        OptimizerFacts("sgd", _of_states(lambda p: ()), passes=3.0, make=_torchs("SGD", momentum=0.0, foreach=False)),
        OptimizerFacts(
            "sgd-momentum",
            _of_states(lambda p: (p.size,)),
            passes=5.0,
            make=_torchs("SGD", momentum=0.9, foreach=False),
        ),
    )
}

# Names of ``optim`` in transformers' training arguments, by which `OPTIMIZERS` has them; of several, the first
# is written.
TRAINER_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw-fused",
    "sgd": "sgd",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "adamw_torch_8bit": "adamw-8bit",
    "paged_adamw_8bit": "adamw-8bit",
    "paged_adamw_32bit": "adamw-32bit",
    "ademamix": "ademamix",
    "paged_ademamix_32bit": "ademamix",
    "ademamix_8bit": "ademamix-8bit",
    "paged_ademamix_8bit": "ademamix-8bit",
    "lion_32bit": "lion",
    "paged_lion_32bit": "lion",
    "lion_8bit": "lion-8bit",
    "paged_lion_8bit": "lion-8bit",
    "rmsprop": "rmsprop",
    "rmsprop_bnb": "rmsprop-32bit",
    "rmsprop_bnb_32bit": "rmsprop-32bit",
    "rmsprop_bnb_8bit": "rmsprop-8bit",
    "adagrad": "adagrad",
    "adafactor": "adafactor",
}
