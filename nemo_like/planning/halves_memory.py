"""What a block needs in each half of a backward that a pipeline's schedule cuts in two, and keeps between them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nemo_like.activation_checkpointing.engine import half_of_backward, run_region
from nemo_like.activation_checkpointing.policy import Policy
from nemo_like.model_copy import leaves_of, with_state
from nemo_like.planning.block_memory import (
    OutputGradients,
    gradients_by_place,
    needing_no_values,
    numbers_of,
    with_gradients,
)
from nemo_like.planning.fake import FakeRun
from nemo_like.planning.gradient_sums import SumsInPlace
from nemo_like.planning.kinds import Kind
from nemo_like.planning.meter import LiveBytes
from nemo_like.planning.program.records import BlockEvents
from nemo_like.tensors import map_tensors, tensors_in
from nemo_like.torch_compat import backward_in_halves


@dataclass(frozen=True)
class HalvesMemory:
    """Bytes above what was alive before the block ran. Its parameters and inputs are not counted."""

    inputs_peak: int
    """While the first half runs: with what is held, gradients of its output and of its inputs."""
    input_grad: int
    kept: int
    """Between the halves, without the gradients of its inputs."""
    kept_output_grad: int
    """Of that, gradients of its output."""
    weights_peak: int
    """While the second half runs."""
    param_grad: int
    """Gradients of its parameters at its end; none where it added to those that were there."""
    events: BlockEvents = field(default_factory=BlockEvents)
    """What it allocates and frees, in order."""


def backward_of_inputs(
    outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] | None, inputs: Sequence[torch.Tensor],
    params: Iterable[torch.Tensor], once: bool = True,
) -> Callable[[], None]:  # fmt: skip
    """Run the first half of a backward, which leaves its gradients in ``inputs[i].grad``; the second is returned.

    `once`: what was checkpointed is replayed in the first half for both.
    """
    first, second = backward_in_halves()
    weights = [p for p in params if p.requires_grad and p.is_leaf]
    with half_of_backward("inputs") if once else contextlib.nullcontext():
        _, groups = first(list(outputs), grads, list(inputs), iter(weights))

    def rest() -> None:
        with half_of_backward("weights"):
            second(iter(weights), groups)

    return rest


class _Called(nn.Module):
    """A call of a block. The engine remembers of a module what each half needs."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._call = block.__call__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class _WatchedGradients(torch.autograd.Function):
    """`OutputGradients` that says of those that it makes whether they are alive."""

    @staticmethod
    def forward(
        ctx: Any, made: list[weakref.ref[Any]], stay: list[torch.Tensor] | None, *outputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.made = made
        return OutputGradients.forward(ctx, [None] * len(outputs), stay, *outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        found = OutputGradients.backward(ctx, *grads)
        ctx.made.extend(weakref.ref(grad.untyped_storage()) for grad in found[2:])
        return found


def halves_memory(
    kind: Kind, policy: Policy | None, run: FakeRun, used: Collection[int], *, accumulate: bool, once: bool = True,
    received: bool = False,
) -> HalvesMemory:  # fmt: skip
    """Run a block forward and through both halves of its backward on fake tensors, as `block_memory` does in one piece.

    Args:
        kind, policy, run, used, accumulate, received: as for `block_memory`.
        once: whether the first half replays for both.
    """
    state = leaves_of(kind.state)
    block, found = _Called(kind.module), None
    with needing_no_values(kind), with_state(kind.module, state):
        for _ in range(2 if policy is not None and once else 1):  # from the second backward on, the engine knows more
            found = _run(block, kind, state, policy, run, used, accumulate=accumulate, once=once, received=received)
    assert found is not None
    return found


def _run(
    block: _Called, kind: Kind, state: Mapping[str, torch.Tensor], policy: Policy | None, run: FakeRun, used: Collection[int],
    *, accumulate: bool, once: bool, received: bool,
) -> HalvesMemory:  # fmt: skip
    replaced: dict[int, torch.Tensor] = {}
    leaves = list(dict.fromkeys(state.values()))

    def stand_in(value: torch.Tensor) -> torch.Tensor:
        return replaced.setdefault(id(value), value.detach().requires_grad_(value.requires_grad))

    args, kwargs = map_tensors(stand_in, (kind.args, kind.kwargs))
    for tensor in leaves:
        tensor.grad = None
    before = with_gradients(leaves, run) if accumulate else []
    meter = LiveBytes([*leaves, *replaced.values(), *before])
    inputs = [t for t in replaced.values() if t.requires_grad]
    with run, meter, SumsInPlace():
        with run.casting(), torch.set_grad_enabled(kind.grad):
            out = (
                block(*args, **kwargs)
                if policy is None
                else run_region(block, args, kwargs, policy=policy, name="planned block")
            )
        outputs = tuple(map(meter.number, tensors_in(out)))
        places = [
            i for i, t in enumerate(tensors_in(out)) if t.requires_grad and i not in kind.passed and i in used
        ]
        roots = [tensors_in(out)[i] for i in places]
        if not roots:
            return HalvesMemory(meter.lap(), 0, 0, 0, 0, 0, BlockEvents(tuple(meter.log), (), outputs))
        made: list[weakref.ref[Any]] = []
        stay: list[torch.Tensor] | None = [] if received else None
        gradients = _WatchedGradients.apply(made, stay, *roots)
        del out, roots
        meter.lap()
        begun = len(meter.log)
        rest = backward_of_inputs([gradients], [torch.empty_like(gradients)], inputs, leaves, once)
        inputs_peak = meter.lap()
        input_grad = sum(t.grad.untyped_storage().nbytes() for t in inputs if t.grad is not None)
        kept, ended = meter.live - input_grad, len(meter.log)
        to_inputs = {place: meter.number(grad) for place, grad in gradients_by_place(kind, replaced).items()}
        kept_output_grad = sum(s.nbytes() for ref in made if (s := ref()) is not None)
        for tensor in inputs:
            tensor.grad = None
        meter.lap()
        rest()
        weights_peak = meter.lap()
        grads = [t.grad for t in leaves if t.grad is not None]
        log, first = tuple(meter.log), tuple(meter.log[begun:ended])
        of_outputs = dict(zip(places, (number for number, size in first if size)))
        weights = tuple((n, size) for n, size in log[ended:] if size or n not in to_inputs.values())
        events = BlockEvents(log[:begun], first, outputs, of_outputs, to_inputs, numbers_of(meter, state), weights)
    param_grad = 0 if accumulate else sum(grad.untyped_storage().nbytes() for grad in grads)
    return HalvesMemory(inputs_peak, input_grad, kept, kept_output_grad, weights_peak, param_grad, events)
