"""What an optimizer holds on one rank: its state, and the temporaries of its step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_COUNTER = 4
"""Bytes of AdamW's counter of steps."""
QUANTIZED_BLOCK, SMALLEST_QUANTIZED = 256, 4096
"""Of 8-bit states: values that share a scale, and elements from which on a parameter has them."""


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter that an optimizer steps."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    elements: int
    """On this rank, padding included."""
    itemsize: int
    in_layer: bool = False
    """It belongs to a layer: not embedding, last norm or head."""

    @property
    def size(self) -> int:
        """Bytes on this rank."""
        return self.elements * self.itemsize

    @property
    def by_muon(self) -> bool:
        """Muon takes the matrices of layers; AdamW steps all else beside it (Jordan et al., ``KellerJordan/Muon``)."""
        return self.in_layer and len(self.shape) == 2


@dataclass(frozen=True)
class StepTemporaries:
    """What one pass over parameters makes and drops, bytes."""

    alone: tuple[tuple[int, ...], ...] = ()
    """Of each parameter, while it is stepped alone. The last one stays until the next parameter has made its first, or,
    unless `hands_over`, all of its own."""
    together: tuple[int, ...] = ()
    """Those that are there at one time, one of each parameter."""
    hands_over: bool = False

    @property
    def most(self) -> int:
        """The most of them at one time."""
        found, before = sum(self.together), 0
        for sizes in self.alone:
            own = sum(sizes)
            found = max(found, before + sizes[0], own) if self.hands_over else max(found, before + own)
            before = sizes[-1]
        return found


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes on one rank."""

    states: tuple[tuple[int, ...], ...]
    """The tensors of each parameter's state."""
    passes: tuple[StepTemporaries, ...] = ()
    """One after the other."""

    @cached_property
    def state(self) -> int:
        """All of the state."""
        return sum(map(sum, self.states))

    @cached_property
    def step(self) -> int:
        """Most that the step's temporaries take."""
        return max((each.most for each in self.passes), default=0)


def optimizer_memory(trained: Sequence[TrainedParameter], name: str, *, device: str) -> OptimizerMemory:
    """The memory of an optimizer on one rank.

    - AdamW's loop over parameters holds two temporaries of one parameter, and, from the second on, the last one of the
      parameter before; a ``foreach`` step one of all parameters; a fused one none (``torch/optim/adam.py``, torch 2.13).
      Each parameter has a counter of steps, a float32, which only a fused step has on another device than the CPU.
    - ``adamw-8bit``: one byte per value and a float32 scale per 256, from 4096 elements on, else float32 (Dettmers et al.,
      arXiv 2110.02861; ``min_8bit_size`` and block size of bitsandbytes). torchao's keeps parameters that 256 does not
      divide as they are, and a table of 1 KiB for each state.
    - ``adamw-bf16``: both moments in two bytes (DeepSeek-V3, arXiv 2412.19437, section 3.3), stepped by a fused kernel.
    - ``muon``: `torch.optim.Muon` for the matrices of layers, AdamW for all else, one after the other. Its state is one
      momentum; its step holds an update of one matrix and, in bfloat16, two of its iterates and three products of the
      shorter side. Ranks that shard a matrix are taken to gather it whole.

    Args:
        trained: the parameters, in the optimizer's order.
        name: one of `nemo_like.options.OPTIMIZERS`.
        device: the kind that the parameters are on: on ``cuda``, torch steps with ``foreach`` where nobody says.
    """
    if name == "muon":
        return _with_muon(trained, device)
    if name == "sgd":
        return OptimizerMemory(((),) * len(trained))
    if name == "sgd-momentum":
        return OptimizerMemory(tuple((p.size,) for p in trained))
    if name == "adamw-8bit":
        return OptimizerMemory(tuple(_quantized(p) for p in trained))
    if name == "adamw-bf16":
        return OptimizerMemory(tuple((2 * p.elements, 2 * p.elements) for p in trained))
    if name == "adamw":
        name = "adamw-foreach" if device == "cuda" else "adamw-loop"
    both = tuple((p.size, p.size) for p in trained)
    counter = (_COUNTER,) if device == "cpu" or name == "adamw-fused" else ()
    return OptimizerMemory(tuple((*own, *counter) for own in both), {
        "adamw-loop": (StepTemporaries(alone=both),),
        "adamw-foreach": (StepTemporaries(together=tuple(p.size for p in trained)),),
        "adamw-fused": (),
    }[name])  # fmt: skip


def _quantized(param: TrainedParameter) -> tuple[int, ...]:
    if param.elements < SMALLEST_QUANTIZED:
        return 4 * param.elements, 4 * param.elements
    scales = 4 * -(-param.elements // QUANTIZED_BLOCK)
    return param.elements, param.elements, scales, scales


def _with_muon(trained: Sequence[TrainedParameter], device: str) -> OptimizerMemory:
    rest = optimizer_memory([p for p in trained if not p.by_muon], "adamw", device=device)
    states = iter(rest.states)
    muon = StepTemporaries(tuple(_orthogonalized(p) for p in trained if p.by_muon), hands_over=True)
    return OptimizerMemory(tuple((p.size,) if p.by_muon else next(states) for p in trained), (muon, *rest.passes))


def _orthogonalized(param: TrainedParameter) -> tuple[int, ...]:
    """Of one matrix: the update, what products take beyond the two iterates, and the iterates; the last one stays."""
    short = min(param.shape)
    update, iterate, product = math.prod(param.shape) * param.itemsize, 2 * math.prod(param.shape), 2 * short * short
    # Either the products of one round and the next iterate, or those of two rounds, in which the next one begins.
    return update, max(iterate + 2 * product, 3 * product), iterate
