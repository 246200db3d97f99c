"""Measure the memory of a block in forward, recomputation and backward, on fake tensors, through the engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from nemo_like._util.tensors import Place, by_argument, map_tensors, tensors_in
from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.activation_checkpointing.policy import Policy
from nemo_like.fake.model_copy import leaves_of, with_state
from nemo_like.fake.reasons import without_values
from nemo_like.fake.run import FakeRun
from nemo_like.options.optimizers import TrainedParameter, UpdateInBackward
from nemo_like.planning.trace.kinds import BlockKind
from nemo_like.planning.trace.meter import SumsInPlace, TracedBytes
from nemo_like.planning.trace.records import BlockEvents
from nemo_like.torch_compat import backward_in_halves


def block_memory(
    kind: BlockKind,
    policy: Policy | None,
    run: FakeRun,
    used: Collection[int],
    *,
    accumulate: bool | UpdateInBackward,
    layouts: Mapping[int, tuple[int, ...]] | None = None,
    received: bool = False,
    apart: Collection[nn.Module] = (),
    halves: bool = False,
    held: bool = False,
) -> BlockEvents:
    """Run a block forward and backward on fake tensors under `policy` (None: no region) and watch its memory.

    The engine itself runs, so a table that the engine would refuse is refused here.

    Args:
        kind: the block, and how it is called.
        policy: what its region saves.
        run: the run that fakes tensors.
        used: positions of the tensors of its output that get a gradient (`OuterMemory.used`).
        accumulate: its parameters have gradients before, which are not counted, and backward adds to them; or backward
            steps with each gradient, and frees it.
        layouts: strides of those of these gradients that are not in rows (`OuterMemory.layouts`).
        received: the gradients of its output stay, as a pipeline's receiving buffers do: nothing is added into them. They
            are counted all the time.
        apart: modules of the model that are FSDP2 units inside of a layer (experts).
        halves: run backward in two halves, as some schedules of pipelines do. A checkpointed block is recomputed in each.
        held: with `halves`, the stage trains parameters behind the block, whose second half comes later and starts at nodes
            that have references to the block's graph: what no half runs through stays till then, and is not freed in the
            logs.

    Raises:
        RegionError, PlanMismatchError: `policy` does not fit the block.
        ValueError: its step depends on values, so that it cannot be planned.
    """
    replaced: dict[int, torch.Tensor] = {}

    def stand_in(value: torch.Tensor) -> torch.Tensor:
        return replaced.setdefault(id(value), value.detach().requires_grad_(value.requires_grad))

    args, kwargs = map_tensors(stand_in, (kind.args, kind.kwargs))
    state = leaves_of(kind.state)
    leaves = list(dict.fromkeys(state.values()))
    before = with_gradients(leaves, run, accumulate) if accumulate else []
    meter = TracedBytes([*leaves, *replaced.values(), *before])
    ends: list[int] = []
    with (
        needing_no_values(kind),
        with_state(kind.module, state),
        run,
        meter,
        SumsInPlace(),
        _backward_ends(kind.module, apart, lambda: ends.append(len(meter.log))),
    ):
        with run.casting(), torch.set_grad_enabled(kind.grad):
            if policy is None:
                out = kind.run(*args, **kwargs)
            else:
                out = run_region(kind.run, args, kwargs, policy=policy, name="planned block", transfer=_ToHost())
        tensors = tensors_in(out)
        outputs = tuple(map(meter.number, tensors))
        roots = {i: t for i, t in enumerate(tensors) if t.requires_grad and i not in kind.passed and i in used}
        if not roots:
            return BlockEvents(tuple(meter.log), (), outputs)
        positions = tuple(roots)
        # What follows sees the output freed where autograd does not keep it, as in a real backward, and the gradients
        # of the output as soon as autograd is done with them.
        stay: list[torch.Tensor] | None = [] if received else None
        gradients = OutputGradients.apply([(layouts or {}).get(i) for i in roots], stay, *roots.values())
        del out, tensors, roots
        begun, graph = len(meter.log), gradients.grad_fn
        if halves:
            inputs = [t for t in replaced.values() if t.requires_grad]
            rest = backward_of_inputs([gradients], [torch.empty_like(gradients)], inputs, leaves)
        else:
            gradients.backward(torch.empty_like(gradients))
        ended = len(meter.log)
        to_inputs = {place: meter.number(grad) for place, grad in gradients_by_place(kind, replaced).items()}
        if halves:
            for tensor in inputs:
                tensor.grad = None
            graph = graph if held else None  # it stays until the logs are read
        second = len(meter.log)
        if halves:
            rest()
        log, given_back = tuple(meter.log), set(to_inputs.values())
        backward = log[begun:ended]
        return BlockEvents(
            log[:begun],
            backward,
            outputs,
            dict(zip(positions, (number for number, size in backward if size))),
            to_inputs,
            numbers_of(meter, state),
            apart_end=ends[-1] - begun if ends else len(backward),
            released=tuple((n, size) for n, size in log[ended:second] if n not in given_back),
            weights=tuple((n, size) for n, size in log[second:] if size or n not in given_back),
        )


@contextmanager
def _backward_ends(block: nn.Module, apart: Collection[nn.Module], ended: Callable[[], None]) -> Iterator[None]:
    """Call `ended` where the gradients of the inputs of a module of `apart` are there, as FSDP2's hook is called
    (`RegisterPostBackwardFunction`)."""

    def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        if not inputs:
            return None
        marked = dict(zip(map(id, inputs), _Marked.apply(ended, *inputs)))
        return map_tensors(lambda t: marked.get(id(t), t), (args, kwargs))

    with ExitStack() as stack:
        for module in block.modules():
            if module in apart:
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


class _Marked(torch.autograd.Function):
    """Identity of its inputs; reports when their gradients are there."""

    @staticmethod
    def forward(ctx: Any, ended: Callable[[], None], *inputs: torch.Tensor) -> Any:
        ctx.ended = ended
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.ended()
        return None, *grads


def gradients_by_place(kind: BlockKind, replaced: Mapping[int, torch.Tensor]) -> dict[Place, torch.Tensor]:
    """Return the gradient of each tensor of the block's call that has one, under its first place.

    replaced: what the block was called with, by the ids of these tensors.
    """
    first: dict[int, Place] = {}
    for place, tensor in by_argument(kind.args, kind.kwargs).items():
        first.setdefault(id(tensor), place)
    return {place: grad for key, place in first.items() if (grad := replaced[key].grad) is not None}


def numbers_of(meter: TracedBytes, state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the numbers of the gradients of a block's parameters by first name, but for those that backward added to."""
    first: dict[int, str] = {}
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    named = {name: meter.number(grad) for name in first.values() if (grad := state[name].grad) is not None}
    return {name: number for name, number in named.items() if number}


class _Away:
    """Layout of a tensor that is in CPU memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype

    def get(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


class _ToHost:
    """CPU memory, which is not the device's: nothing there is counted. What comes back counts once it is requested."""

    def to_host(self, tensor: torch.Tensor) -> _Away:
        return _Away(tensor)

    def prefetch(self, handle: Any) -> None:
        """Start nothing."""


def needing_no_values(kind: BlockKind) -> AbstractContextManager[None]:
    """Return a context for a step of the block, in which a look at values is an error that names the block."""
    name = type(kind.module).__name__ if kind.trace is None else kind.trace.name
    return without_values(f"{name} cannot be planned: its step", kind.module)


def with_gradients(
    params: Iterable[torch.Tensor], run: FakeRun, accumulate: bool | UpdateInBackward, *, in_layer: bool = True
) -> list[torch.Tensor]:
    """Give each of `params` that trains a gradient, and return these; or let backward step with it."""
    grads: list[torch.Tensor] = []
    for param in params:
        if not param.requires_grad or not param.is_leaf:
            continue
        if isinstance(accumulate, UpdateInBackward):
            param.register_post_accumulate_grad_hook(functools.partial(_step_with, accumulate, in_layer))
        else:
            with run.fake:
                param.grad = torch.empty_like(param)
            grads.append(param.grad)
    return grads


def _step_with(update: UpdateInBackward, in_layer: bool, param: torch.Tensor) -> None:
    described = TrainedParameter(tuple(param.shape), param.numel(), param.element_size(), in_layer)
    torch.empty(update.temporaries(described), dtype=torch.uint8)
    param.grad = None


class OutputGradients(torch.autograd.Function):
    """Empty tensor, made of all outputs; its backward makes their gradients, and puts them into the list of its call."""

    @staticmethod
    def forward(
        ctx: Any, strides: list[tuple[int, ...] | None], stay: list[torch.Tensor] | None, *outputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.layouts, ctx.stay = [(t.shape, stride, t.dtype) for t, stride in zip(outputs, strides)], stay
        return outputs[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        made_grads = tuple(
            torch.empty(shape, dtype=dtype) if stride is None else torch.empty_strided(shape, stride, dtype=dtype)
            for shape, stride, dtype in ctx.layouts
        )
        if ctx.stay is not None:
            ctx.stay += made_grads
        return None, None, *made_grads


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
    params: Iterable[torch.Tensor],
) -> Callable[[], None]:
    """Run the first half of a backward, which leaves its gradients in ``inputs[i].grad``; return the second."""
    first, second = backward_in_halves()
    weights = [p for p in params if p.requires_grad and p.is_leaf]
    _, groups = first(list(outputs), grads, list(inputs), iter(weights))
    return lambda: second(iter(weights), groups)
