"""What a block needs in each half of a backward that a pipeline's schedule cuts in two, and keeps between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nemo_like._util.tensors import map_tensors, tensors_in
from nemo_like.activation_checkpointing.engine import half_of_backward, run_region
from nemo_like.activation_checkpointing.policy import Policy
from nemo_like.fake.model_copy import leaves_of, with_state
from nemo_like.fake.run import FakeRun
from nemo_like.planning.block_memory import (
    OutputGradients,
    gradients_by_place,
    needing_no_values,
    numbers_of,
    with_gradients,
)
from nemo_like.planning.gradient_sums import SumsInPlace
from nemo_like.planning.kinds import Kind
from nemo_like.planning.meter import LiveBytes
from nemo_like.planning.program.records import BlockEvents
from nemo_like.torch_compat import backward_in_halves


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
    params: Iterable[torch.Tensor],
    once: bool = True,
) -> Callable[[], None]:
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


def halves_memory(
    kind: Kind,
    policy: Policy | None,
    run: FakeRun,
    used: Collection[int],
    *,
    accumulate: bool,
    once: bool = True,
    received: bool = False,
) -> BlockEvents:
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
    block: _Called,
    kind: Kind,
    state: Mapping[str, torch.Tensor],
    policy: Policy | None,
    run: FakeRun,
    used: Collection[int],
    *,
    accumulate: bool,
    once: bool,
    received: bool,
) -> BlockEvents:
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
        places = [i for i, t in enumerate(tensors_in(out)) if t.requires_grad and i not in kind.passed and i in used]
        roots = [tensors_in(out)[i] for i in places]
        if not roots:
            return BlockEvents(tuple(meter.log), (), outputs)
        stay: list[torch.Tensor] | None = [] if received else None
        gradients = OutputGradients.apply([None] * len(roots), stay, *roots)
        del out, roots
        begun = len(meter.log)
        rest = backward_of_inputs([gradients], [torch.empty_like(gradients)], inputs, leaves, once)
        ended = len(meter.log)
        to_inputs = {place: meter.number(grad) for place, grad in gradients_by_place(kind, replaced).items()}
        for tensor in inputs:
            tensor.grad = None
        rest()
        log, first = tuple(meter.log), tuple(meter.log[begun:ended])
        of_outputs = dict(zip(places, (number for number, size in first if size)))
        weights = tuple((n, size) for n, size in log[ended:] if size or n not in to_inputs.values())
        grads = numbers_of(meter, state)
        return BlockEvents(log[:begun], first, outputs, of_outputs, to_inputs, grads, weights=weights)
