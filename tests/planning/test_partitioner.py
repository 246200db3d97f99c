"""Against PyTorch's own: the compiler's partitioner under a memory budget, on one block, at equal bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx
from torch._functorch import config
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition

from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing import ops
from nemo_like.planning.choose import closure
from nemo_like.planning.choose.layer import BlockProblem
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.roofline import op_seconds
from nemo_like.planning.trace.block import OpRecord, trace_block
from nemo_like.torch_compat import fake_tensor_types
from tests.models.llama_style import D, LlamaStyle, S
from tests.planning.brute_force import at_budget

BUDGETS = [step / 20 for step in range(20)]
DEVICE = resolve_device("h100-80gb")
Theirs = tuple[int, int, float]
"""Bytes kept without inputs; FLOPs and seconds of what is run again."""


def _block() -> tuple[LlamaStyle, torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.device("meta"):
        x = torch.empty(1, S, D, dtype=torch.bfloat16, requires_grad=True)
        return LlamaStyle().bfloat16(), x, *(torch.empty(1, 1, S, 128, dtype=torch.bfloat16) for _ in "cs")


def _joint() -> tuple[fx.GraphModule, set[str]]:
    """Forward and backward of the block as one graph, and the inputs that are its parameters and tables."""
    _, mode = fake_tensor_types()
    block, *inputs = _block()
    names, params = zip(*block.named_parameters())
    with mode():
        made = [torch.empty(t.shape, dtype=t.dtype).requires_grad_(t.requires_grad) for t in (*params, *inputs)]

        def call(*given: torch.Tensor) -> tuple[torch.Tensor]:
            state = dict(zip(names, given))
            return (torch.func.functional_call(block, state, given[len(names) :]),)

        graph = aot_export_joint_simple(call, tuple(made), trace_joint=True)
    places = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    return graph, {name for i, name in enumerate(places[: len(made)]) if i != len(params)}


def _value(value: Any) -> Any:
    return fx.node.map_arg(value, lambda node: node.meta["val"])


def _flops(node: fx.Node) -> int:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return 0
    return ops.kernel_flops(node.target, _value(node.args), dict(_value(node.kwargs)), node.meta["val"])


def _seconds(node: fx.Node) -> float:
    """By the roofline that plans are made with."""
    if not isinstance(node.target, torch._ops.OpOverload) or ops.facts(node.target).free:
        return 0.0
    inputs, outputs = tensors_in((_value(node.args), dict(_value(node.kwargs)))), tensors_in(node.meta["val"])
    half = any(t.is_floating_point() and t.element_size() == 2 for t in inputs + outputs)
    moved = ops.moved_bytes(node.target, inputs, outputs)
    shapes = tuple(tuple(t.shape) for t in outputs)
    record = OpRecord(node.target, 0, shapes, 0, _flops(node), moved, (), (), view=False, random=False, half=half)
    return op_seconds(record, DEVICE)


def _source(node: fx.Node) -> fx.Node:
    """Where the memory of `node` comes from, through views."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and ops.facts(node.target).free:
        node = node.args[0]
    return node


def _partitioned(joint: fx.GraphModule, constant: set[str], budget: float) -> Theirs:
    graph = copy.deepcopy(joint)
    with config.patch(activation_memory_budget=budget):
        forward, backward = min_cut_rematerialization_partition(graph, None, num_fwd_outputs=1)
    (results,) = (node.args[0] for node in forward.graph.nodes if node.op == "output")
    saved: dict[str, int] = {}
    for node in map(_source, results[1:]):
        if node.op != "placeholder" and node.name not in constant:
            value = node.meta["val"]
            saved[node.name] = value.numel() * value.element_size()
    once = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    again = [node for node in backward.graph.nodes if node.op == "call_function" and node.name in once]
    return sum(saved.values()), sum(map(_flops, again)), sum(map(_seconds, again))


@pytest.fixture(scope="module")
def problem() -> BlockProblem:
    block, x, cos, sin = _block()
    return BlockProblem(trace_block(block, (x, cos, sin), shared=(cos, sin)), DEVICE)


@pytest.fixture(scope="module")
def theirs() -> list[Theirs]:
    joint, constant = _joint()
    return [_partitioned(joint, constant, budget) for budget in BUDGETS]


@pytest.mark.parametrize("by", ["flops", "seconds"])
def test_the_partitioner_is_better_at_no_budget(problem: BlockProblem, theirs: list[Theirs], by: str) -> None:
    """What is run again, for no more bytes than it keeps."""
    points = closure.closure_every(problem.ops(by=by))
    assert points is not None
    better = 0
    for budget, (kept, flops, seconds) in zip(BUDGETS, theirs, strict=True):
        ours, cost = at_budget(points, kept), flops if by == "flops" else seconds
        assert ours is not None and ours.cost <= cost * (1 + 1e-9), (budget, kept / (S * D), ours.cost, cost)
        better += ours.cost < 0.99 * cost
    assert better >= 10


def test_five_bytes_per_token_and_width(problem: BlockProblem, theirs: list[Theirs]) -> None:
    """The inputs, attention's output, and a key or a value: less than .62 of a forward is run again."""
    points = closure.closure_every(problem.ops(by="flops"))
    assert points is not None
    ours = at_budget(points, 3 * S * D)
    assert ours is not None and ours.cost <= 0.62 * problem.trace.flops
    assert min(flops for kept, flops, _ in theirs if kept <= 3 * S * D) >= 0.66 * problem.trace.flops
