"""Plans under torch.compile: gradients and bytes as planned; at equal bytes against PyTorch's own partitioner."""

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import fx
from torch._functorch import config
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.autograd.graph import saved_tensors_hooks

from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing import ops
from nemo_like.compile import compile_layers
from nemo_like.planning import apply_plan, plan_for
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.roofline import op_seconds
from nemo_like.planning.selection import solver
from nemo_like.planning.selection.layer import BlockProblem
from nemo_like.planning.trace.block import OpRecord
from nemo_like.torch_compat import fake_tensor_types
from tests.checks import seeded
from tests.models.blocks import Stack, mean_square
from tests.models.llama_style import D, LlamaStyle, S
from tests.models.tiny import Block
from tests.planning.brute_force import at_budget
from tests.planning.queries import traced_block

HIDDEN = 32


def _model(dropout: float) -> Stack:
    return Stack((Block(HIDDEN, 4 * HIDDEN, act=torch.tanh, dropout=dropout) for _ in range(2)), head=mean_square)


def _run(budget: str | None, backend: str | None, dropout: float):
    """Gradients of a step, the bytes of activations that autograd was given to keep, and the plan."""
    torch._dynamo.reset()
    model, x = seeded(_model, dropout), torch.randn(2, 16, HIDDEN, requires_grad=True)
    plan = None
    if budget is not None:
        plan = plan_for(model, ac=budget, sample_input=x, gpu="h100-80gb")
        apply_plan(model, plan, device_type="cpu", compile=backend is not None)
    if backend is not None:
        compile_layers(model, backend, model.layers)
    torch.manual_seed(1)
    params = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in params:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        loss = model(x)
    loss.backward()
    return [p.grad for p in [x, *model.parameters()]], sum(kept.values()), plan


def _assert_derivative(budget: str, backend: str, dropout: float) -> None:
    """The gradient along a random direction, of input and parameters at once, is the loss's central difference."""
    torch._dynamo.reset()
    model, x = seeded(_model, dropout).double(), torch.randn(2, 16, HIDDEN, dtype=torch.float64, requires_grad=True)
    apply_plan(model, plan_for(model, ac=budget, sample_input=x, gpu="h100-80gb"), device_type="cpu", compile=True)
    compile_layers(model, backend, model.layers)
    leaves = [x, *model.parameters()]
    directions = [torch.randn_like(leaf) for leaf in leaves]

    def loss_at(distance: float) -> torch.Tensor:
        with torch.no_grad():
            for leaf, direction in zip(leaves, directions, strict=True):
                leaf.add_(direction, alpha=distance)
        return seeded(model, x, seed=1)

    loss_at(0.0).backward()
    slope = sum((leaf.grad * direction).sum() for leaf, direction in zip(leaves, directions, strict=True))
    step = 1e-5
    above, below = loss_at(step), loss_at(-2 * step)
    torch.testing.assert_close(slope, ((above - below) / (2 * step)).detach(), rtol=1e-6, atol=0)


def _skip_without_a_compiler(backend: str | None) -> None:
    if backend == "inductor" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        pytest.skip("Inductor needs a C++ compiler here")


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "budgets"),
    [(None, ("25%", "50%", "75%")), ("aot_eager", ("25%", "50%", "75%")), ("inductor", ("50%",))],
    ids=["eager", "aot_eager", "inductor"],
)
def test_dropout_is_right_at_every_budget(backend, budgets):
    """Known failure 26: PyTorch's memory-budget partitioner recomputes random ops without their state (#190758).

    From 2.15 on, inductor draws other masks in a checkpointed region than outside: no other run draws those of this one,
    so gradients are compared with differences of the loss itself, whose masks hang on the seed alone.
    """
    _skip_without_a_compiler(backend)
    wanted, _, _ = _run(None, backend, 0.2)
    for budget in budgets:
        got, _, plan = _run(budget, backend, 0.2)
        assert any(layer.decisions is not None for layer in plan.layers)
        if backend == "inductor" and torch.__version__ >= (2, 15):
            _assert_derivative(budget, backend, 0.2)
            continue
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a, b), (budget, backend)


@pytest.mark.few(1)
@pytest.mark.parametrize(("backend", "budgets"), [("aot_eager", ("25%", "50%", "75%")), ("inductor", ("25%", "75%"))])
def test_compiled_layers_keep_what_was_planned(backend, budgets):
    """The partitioner follows the tables; besides, it keeps what costs it nothing: statistics of norms."""
    output = 2 * 16 * HIDDEN * 4  # the loss keeps the last layer's output
    statistics = 2 * 2 * 2 * 16 * 4  # mean and rstd of each layer's norm
    _skip_without_a_compiler(backend)
    for budget in budgets:
        _, kept, plan = _run(budget, backend, 0.0)
        # Inductor fuses a norm with its neighbours, and may also drop statistics that the plan counted.
        fewest = plan.held_bytes - (statistics if backend == "inductor" else 0)
        assert fewest <= kept - output <= plan.held_bytes + statistics, budget


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
            return (torch.func.functional_call(block, dict(zip(names, given)), given[len(names) :]),)

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
    record = OpRecord(node.target, 0, shapes, 0, _flops(node), moved, (), view=False, random=False, half=half)
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
    return BlockProblem(traced_block(block, x, cos, sin, shared=(cos, sin)), DEVICE)


@pytest.fixture(scope="module")
def theirs() -> list[Theirs]:
    joint, constant = _joint()
    return [_partitioned(joint, constant, budget) for budget in BUDGETS]


@pytest.mark.parametrize("by", ["flops", "seconds"])
def test_the_partitioner_is_better_at_no_budget(problem: BlockProblem, theirs: list[Theirs], by: str) -> None:
    """What is run again, for no more bytes than it keeps."""
    points = solver.closure_every(problem.ops(by=by))
    assert points is not None
    better = 0
    for budget, (kept, flops, seconds) in zip(BUDGETS, theirs, strict=True):
        ours, cost = at_budget(points, kept), flops if by == "flops" else seconds
        assert ours is not None and ours.cost <= cost * (1 + 1e-9), (budget, kept / (S * D), ours.cost, cost)
        better += ours.cost < 0.99 * cost
    assert better >= 10


def test_five_bytes_per_token_and_width(problem: BlockProblem, theirs: list[Theirs]) -> None:
    """The inputs, attention's output, and a key or a value: less than .62 of a forward is run again."""
    points = solver.closure_every(problem.ops(by="flops"))
    assert points is not None
    ours = at_budget(points, 3 * S * D)
    assert ours is not None and ours.cost <= 0.62 * problem.trace.flops
    assert min(flops for kept, flops, _ in theirs if kept <= 3 * S * D) >= 0.66 * problem.trace.flops
