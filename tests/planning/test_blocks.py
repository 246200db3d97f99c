"""What is planned of blocks of a few operators: what compiled ones move, leaves, kernels' scratch, untrained parts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import Job, parallelize
from nemo_like.options import MemoryBudget, StepSpec
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.planner import apply_plan, describe
from nemo_like.planning.predictions.budget_search import choose
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.selection.layer import backward_times, fused
from nemo_like.planning.trace.block import BlockTrace
from nemo_like.planning.trace.layer_memory import TracedBytes
from tests.allocator_events import cpu_events
from tests.checks import assert_bitwise, seeded, step
from tests.models.adapted import with_lora
from tests.models.blocks import Layer, Stack, mean_square
from tests.models.tiny import labelled, llama, tokens
from tests.planning.queries import bytes_between_steps, held_bytes, part_of, traced_block

ROWS, WIDTH = 16, 32
BYTES, WEIGHT = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH


def _block(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return Layer(forward, one=nn.Linear(WIDTH, WIDTH, bias=False), other=nn.Linear(WIDTH, WIDTH, bias=False))


def twice(block: Any, x: Tensor) -> Tensor:
    return block.one(x.sin().exp()) + block.other(x.sin().exp())


def _traced(block: nn.Module, *, needs_grad: bool = True) -> BlockTrace:
    return traced_block(block, torch.empty(ROWS, WIDTH, requires_grad=needs_grad))


def _moved(trace: BlockTrace, compiled: bool) -> dict[str, list[int]]:
    moved: dict[str, list[int]] = {}
    for op in fused(trace.ops) if compiled else trace.ops:
        if not op.view:
            moved.setdefault(op.op.name().removeprefix("aten::"), []).append(op.moved)
    return moved


def test_a_row_of_operators_reads_once_and_writes_what_is_read_behind_it() -> None:
    trace = _traced(_block(lambda block, x: block.one((x.sin() + x).exp())))
    assert _moved(trace, compiled=False) == {
        "sin": [2 * BYTES],
        "add.Tensor": [3 * BYTES],
        "exp": [2 * BYTES],
        "mm": [2 * BYTES + WEIGHT],
    }
    # Backward needs the input and the output of exp: the latter is written, and the sum lives in registers.
    assert _moved(trace, compiled=True) == {
        "sin": [BYTES],
        "add.Tensor": [0],
        "exp": [BYTES],
        "mm": [2 * BYTES + WEIGHT],
    }


def test_what_is_computed_twice_is_computed_once() -> None:
    assert _moved(_traced(_block(twice)), compiled=True) == {
        "sin": [BYTES, 0],
        "exp": [BYTES, 0],
        "mm": [2 * BYTES + WEIGHT] * 2,
        "add.Tensor": [3 * BYTES],
    }


def test_numbers_that_are_drawn_twice_are_drawn_twice() -> None:
    noisy = _block(lambda block, x: block.one(torch.rand_like(x) * x) + block.other(torch.rand_like(x) * x))
    assert not any(op.twin is not None for op in _traced(noisy).ops)


def test_what_was_changed_in_between_is_no_twin() -> None:
    def changed(block: Any, x: Tensor) -> Tensor:
        y = x * 2
        first = y.sin()
        y.add_(1)
        return block.one(first) + block.other(y.sin())

    assert not any(op.twin is not None for op in _traced(_block(changed)).ops)


@pytest.mark.parametrize(
    ("frozen", "needs_grad", "times"), [((), True, [2, 2]), (("one",), True, [1, 2]), (("one", "other"), False, [0, 0])]
)
def test_backward_has_a_product_for_each_input_that_needs_a_gradient(
    frozen: tuple[str, ...], needs_grad: bool, times: list[int]
) -> None:
    block = _block(twice)
    for name in frozen:
        block.get_submodule(name).requires_grad_(False)
    cpu = resolve_device("cpu")
    assert [backward_times(op, cpu) for op in _traced(block, needs_grad=needs_grad).ops if op.flops] == times


LEAF_WIDTH, LEAF_ROWS = 32, 512
LEAF = 4 * LEAF_WIDTH * LEAF_ROWS


def with_leaf(block: Any, x: Tensor) -> Tensor:  # (LEAF_ROWS, LEAF_WIDTH) -> the same
    """A stub for attention that no kernel is there for, as MRA's without a GPU."""
    made = torch.zeros_like(x).requires_grad_()
    return x + block.two(torch.tanh(block.one(x + 2 * made)))


@pytest.mark.parametrize("share", [None, 0.6, 0.8])
def test_a_leaf_that_a_block_makes_is_held_whatever_the_plan(share: float | None) -> None:
    torch.manual_seed(0)
    linears = ({name: nn.Linear(LEAF_WIDTH, LEAF_WIDTH) for name in ("one", "two")} for _ in range(3))
    model = Stack((Layer(with_leaf, **parts) for parts in linears), head=mean_square)
    x = torch.randn(LEAF_ROWS, LEAF_WIDTH)
    setup = Job.of(step=StepSpec(keeps_output=False, optimizer="sgd"))
    query = PlanQuery.from_model(model, {"x": x}, setup.change(gpu=resolve_device("cpu")))
    if share is None:
        choices = query.uniform("full")
    else:
        choices = choose(query, MemoryBudget(fraction=share), f"{share:.0%}")
    predicted = peak_of(query, choices)
    calls = query.stages[0].layer_calls(choices[0], accumulate=False)
    trace = part_of(query).problems[0].trace
    for choice, call in zip(choices[0], calls, strict=True):
        inputs = trace.input_bytes if choice.decisions else trace.kept_input_bytes
        assert inputs + call.events.held == choice.held_bytes + LEAF, choice.label
    apply_plan(model, describe(query, choices, "test"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(x).backward()  # the first step compares each replay with its forward
    optimizer.zero_grad()
    before = bytes_between_steps(model, optimizer, gradients=False)
    out: list[Tensor] = []
    held = cpu_events(lambda: out.append(model(x)))[-1]
    out.clear()
    peak = before + max(cpu_events(lambda: model(x).backward()))
    assert abs(held_bytes(query, choices) - held) <= 0.002 * held
    assert abs(predicted.total - peak) <= 0.02 * peak


def test_attention_without_a_fused_kernel_looks_for_empty_rows() -> None:
    scores = torch.randn(4, 4, 64, 64)

    def run() -> torch.Tensor:
        return torch.ops.aten._safe_softmax(scores, -1)

    with TracedBytes([scores]) as meter:
        run()
    assert meter.peak == scores.nbytes + scores.numel() + scores.numel() // 64
    assert max(cpu_events(run)) <= meter.peak + 64


def _adapted(targets: list[str]) -> Callable[[], nn.Module]:
    return lambda: with_lora(llama(), targets)


def _mlps_alone() -> nn.Module:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    return model


MODELS = {"MLPs adapted": _adapted(["gate_proj", "up_proj", "down_proj"]), "MLPs alone": _mlps_alone}


@pytest.mark.parametrize("budget", ["35%", pytest.param("65%", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
def test_attention_that_backward_does_not_need_is_skipped(name: str, budget: str) -> None:
    sample = labelled(tokens(2, 8))
    bare = seeded(MODELS[name]).train()
    model = parallelize(copy.deepcopy(bare), "single", budget, sample_input=sample, device="cpu")
    assert_bitwise(step(model, **sample), step(bare, **sample))
