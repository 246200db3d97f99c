"""Measure the memory of a block in forward, recomputation and backward, on fake tensors, through the engine.

Live bytes count as a plan counts them, and gradients are added as autograd adds them. Memory that a kernel takes and gives
back within one op is counted where it is known to be large. Workspaces of convolutions are not: oneDNN and cuDNN choose
their algorithms by the device.
"""

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import nn

from nemo_like._util.code import callers
from nemo_like._util.live_bytes import LiveBytes
from nemo_like._util.op_lookup import find_op
from nemo_like._util.tensors import Place, by_argument, is_wrapped, map_tensors, tensors_in
from nemo_like.activation_checkpointing.checkpointed import Checkpointed
from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.activation_checkpointing.ops import facts
from nemo_like.activation_checkpointing.policy import Policy
from nemo_like.fake.model_copy import leaves_of, with_state
from nemo_like.fake.reasons import without_values
from nemo_like.fake.run import FakeRun, check_layouts
from nemo_like.options.optimizers import TrainedParameter, UpdateInBackward
from nemo_like.planning.trace.kinds import BlockKind
from nemo_like.planning.trace.records import BlockEvents
from nemo_like.torch_compat import (
    DispatchMode,
    answering_calls,
    backward_in_halves,
    storage_use_count,
    use_count,
    without_dispatch_modes,
)

_SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default
_FLASH = find_op("aten._scaled_dot_product_flash_attention_for_cpu.default")
_FLASH_BACKWARD = find_op("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
_SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList)


def _attention_blocks(query: torch.Tensor, key: torch.Tensor, *, forward: bool) -> int:
    """Return the bytes of the scores that the CPU's kernel keeps of a block of queries and keys for each thread.

    They are in float32; seen in torch 2.13.
    """
    rows, width = query.shape[2], query.shape[3]
    block = 256 if rows >= 768 else 64 if rows >= 192 else 32
    scores = block * min(512, key.shape[2])
    return 4 * torch.get_num_threads() * (scores + block * (width + 2) if forward else 2 * scores)


class TracedBytes(LiveBytes):
    """Counts as a plan does: with `scratch` in the peak, and no layouts that no plan is made of."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(known)
        self.makers: dict[int, Any] = {}  # The operator that made each storage in `log`.

    def changed(self, number: int, size: int) -> None:
        """Note a change as `LiveBytes` does, with the operator that makes it."""
        super().changed(number, size)
        self.makers.setdefault(number, self.operator)

    def scratch(self, func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
        """Return the bytes that an operator takes and gives back beyond its output; 0 where nothing is known."""
        check_layouts(tensors_in(out))
        if func is _FLASH:
            return _attention_blocks(args[0], args[1], forward=True)
        if func is _FLASH_BACKWARD:
            return _attention_blocks(args[1], args[2], forward=False)
        if func in _SUMS and out.dtype != args[0].dtype and not args[0].is_floating_point():  # counts of a mask
            return args[0].numel() * out.element_size()
        if (rule := facts(func).scratch) is not None:
            return rule(args, out)
        if func is _SAFE_SOFTMAX:  # attention without a fused kernel: which scores are -inf, and which rows throughout
            return out.numel() + out.numel() // max(1, out.shape[-1])
        return 0


_ADD = torch.ops.aten.add.Tensor
_PUT = torch.ops.aten.index_put.default
_IN_PLACE = {
    _ADD: torch.ops.aten.add_.Tensor,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    _PUT: torch.ops.aten.index_put_.default,
}
# The module whose frame is the caller of whatever autograd's engine runs on the CPU by itself.
_ENGINE = "torch.autograd.graph"


class SumsInPlace(DispatchMode):
    """Mode that adds in place where autograd would.

    Enter it last, so that it sees operators first: other references to a tensor are only seen from there. Autograd adds
    in place where there are no gradients of gradients and nothing else refers to the first of the two
    (`can_accumulate_inplace` in PyTorch's ``accumulate_grad.h``).
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = _counts_of_the_last_holder()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        in_place = _IN_PLACE.get(func)
        if is_wrapped(types):
            in_place = None  # into a tensor made of others (DTensor) autograd adds nothing
        if in_place is not None and self.counts is not None and _by_the_engine():
            into = args[0]
            # The zeros that the gradient of an index is added to are the engine's own; it writes into a copy of those
            # of a tensor that rows were put into.
            alone = len(args) > 3 and args[3] if func is _PUT else _holders(into) == self.counts
            if alone and into.is_contiguous() and (func is not _ADD or _like(into, args[1])):
                return in_place(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _by_the_engine() -> bool:
    """Return whether the engine called the function that calls this."""
    caller = next(islice(callers(), 2, None), None)
    return caller is not None and not torch.is_grad_enabled() and caller.f_globals.get("__name__") == _ENGINE


def _holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return how often a tensor, its storage and its Python object are referenced.

    All that Python holds of a tensor (such as one that a hook keeps) is one reference to the tensor. In a real step
    only such a tensor has a Python object; in a fake one each does.
    """
    return use_count(tensor), storage_use_count(tensor), sys.getrefcount(tensor)


def _like(into: Any, other: Any) -> bool:
    return (
        isinstance(into, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and into.shape == other.shape
        and into.dtype == other.dtype
        and into.is_contiguous()
    )


class _CountHolders(DispatchMode):
    counts: tuple[int, int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is _ADD and _by_the_engine():
            into = args[0]  # a name of its own counts, too, as in `SumsInPlace`
            self.counts = _holders(into)
        return func(*args, **(kwargs or {}))


def _counts_of_the_last_holder() -> tuple[int, int, int] | None:
    """Return the counts of `_holders` for a tensor in a sum of gradients to which nothing else refers.

    They are measured for each run, as the dispatch itself takes references: how many is torch's own affair, and one more
    once a region with a graph break was compiled in this process. A mode of the caller, which may keep tensors, has no
    part in it.
    """
    with without_dispatch_modes(), _CountHolders() as counting:
        x = torch.ones(2, requires_grad=True) * 2
        torch.autograd.grad((x.exp() + x.sin()).sum(), x)
    return counting.counts


def block_memory(
    kind: BlockKind,
    regions: Mapping[str, Policy],
    run: FakeRun,
    used: Collection[int],
    *,
    accumulate: bool | UpdateInBackward,
    layouts: Mapping[int, tuple[int, ...]] | None = None,
    received: bool = False,
    apart: Collection[nn.Module] = (),
    halves: bool = False,
    held: bool = False,
    compiled: Callable[..., Any] | None = None,
) -> BlockEvents:
    """Run a block forward and backward on fake tensors and watch its memory.

    The engine itself runs, so a table that the engine would refuse is refused here.

    Args:
        kind: the block, and how it is called.
        regions: the policies of its regions, by their paths in it; an empty path: of the block itself; none: no region.
        run: the run that fakes tensors.
        used: positions of the tensors of its output that get a gradient (`OuterEvents.used`).
        accumulate: its parameters have gradients before, which are not counted, and backward adds to them; or backward
            steps with each gradient, and frees it.
        layouts: strides of those of these gradients that are not in rows (`OuterEvents.layouts`).
        received: the gradients of its output stay, as a pipeline's receiving buffers do: nothing is added into them. They
            are counted all the time.
        apart: modules of the model that are FSDP2 units inside of a layer (experts).
        halves: run backward in two halves, as some schedules of pipelines do. A checkpointed block is recomputed in each.
        held: with `halves`, the stage trains parameters behind the block, whose second half comes later and starts at nodes
            that have references to the block's graph: nodes that no half runs through stay till then, and are not freed
            in the logs.
        compiled: is called in the place of the block's module, as that is; None: the module itself.

    Raises:
        RegionError, PlanMismatchError: a policy does not fit the block.
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
        _regions_in_place(kind.module, regions),
        run,
        meter,
        SumsInPlace(),
        _backward_ends(kind.module, apart, lambda: ends.append(len(meter.log))),
        nullcontext() if compiled is None else answering_calls(kind.module, compiled),
    ):
        with run.casting(), torch.set_grad_enabled(kind.grad):
            if "" in regions:
                out = run_region(kind.run, args, kwargs, policy=regions[""], name="planned block")
            else:
                out = kind.run(*args, **kwargs)
        tensors = tensors_in(out)
        outputs = tuple(map(meter.number, tensors))
        roots = {i: t for i, t in enumerate(tensors) if t.requires_grad and i not in kind.passed and i in used}
        if not roots:
            return BlockEvents(tuple(meter.log), (), outputs, makers=meter.makers)
        positions = tuple(roots)
        # The code below sees the output freed where autograd does not keep it, as in a real backward, and the gradients
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
            makers=meter.makers,
        )


@contextmanager
def _regions_in_place(block: nn.Module, policies: Mapping[str, Policy]) -> Iterator[None]:
    """Have the modules of a block with these paths be regions within it."""
    with ExitStack() as stack:
        for path, policy in policies.items():
            if path:
                region = Checkpointed(block.get_submodule(path), policy, name=path)
                stack.enter_context(region.in_place())
        yield


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

    replaced: the block's arguments, by the ids of these tensors.
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
