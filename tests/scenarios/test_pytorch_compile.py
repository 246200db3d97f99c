"""Scenarios by role, written anew from the *cases* of PyTorch's `test/dynamo/test_activation_checkpointing.py`: compiled
regions, and how often an operator is in the graphs of forward and backward.

A choice of them: the Triton kernels, FX-traced flash attention and multi-GPU cases need a GPU; tags in dumped graphs,
invalid context functions, `torch.export` and compiled autograd are PyTorch's own interfaces.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from nemo_like import SelectivePolicy
from nemo_like.activation_checkpointing import DecisionTable, FullPolicy, Policy
from nemo_like.activation_checkpointing.policy import RECOMPUTE, SAVE, TorchPolicy
from tests.checks import assert_bitwise
from tests.models.blocks import checkpoint_region

MM, SIGMOID, CAT = "aten.mm", "aten.sigmoid", "aten.cat"


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A back end that runs the graphs of forward and backward as they are, and counts the operators in each."""

    def __init__(self) -> None:
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        self.forward, self.backward = Counter[str](), Counter[str]()
        self.seen = 0

        def counting(counts: Counter[str]) -> Any:
            def compiler(module: Any, inputs: Any) -> Any:
                self.seen += 1
                counts.update(str(node.target).rpartition(".")[0] for node in module.graph.nodes)
                return make_boxed_func(module.forward)

            return compiler

        self.backend = aot_autograd(
            fw_compiler=counting(self.forward),
            bw_compiler=counting(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )


def slopes(fn: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    copies = [t.detach().clone().requires_grad_() for t in inputs]
    out = fn(*copies)
    return [out.detach(), *torch.autograd.grad(out.sum(), copies)]


def compiled_counts(fn: Callable[..., Tensor], *inputs: Tensor) -> Graphs:
    """The graphs of `fn`, compiled as one piece; its result and gradients are those of eager `fn`."""
    graphs = Graphs()
    assert_bitwise(slopes(torch.compile(fn, backend=graphs.backend, fullgraph=True), *inputs), slopes(fn, *inputs))
    assert graphs.seen == 2
    return graphs


def matrices(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator) for _ in range(count)]


def again(fn: Callable[..., Tensor], policy: Policy | None = None, **keywords: Any) -> Callable[..., Tensor]:
    return lambda *args: checkpoint_region(fn, *args, policy=policy or FullPolicy(), **keywords)


def one_matmul(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(torch.matmul(x, y))


def two_matmuls(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(torch.matmul(torch.matmul(x, y), y)) * y


def keeping(*names: str) -> SelectivePolicy:
    return SelectivePolicy(every_nth_matmul=None, save_ops=[f"{name}.default" for name in names])


class KeepsMatmuls:
    """A policy as an object that is called, not a function."""

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def in_a_row(x: Tensor, y: Tensor) -> Tensor:
    z = again(one_matmul)(torch.sin(x), y)
    return again(one_matmul)(torch.sin(z), y)


def with_a_keyword(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    def product(a: Tensor, b: Tensor, factor: Tensor | None = None) -> Tensor:
        out = torch.matmul(a, b)
        return out if factor is None else torch.matmul(out, factor)

    return torch.cos(checkpoint_region(product, x, y, policy=FullPolicy(), factor=z))


def with_a_list(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    def parts(a: Tensor, others: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return a * 1, [torch.cos(other) for other in others]

    first, rest = checkpoint_region(parts, x, [y, z], policy=FullPolicy())
    return first + rest[0] * rest[1]


def outplace(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(torch.selu(torch.matmul(torch.matmul(x, y), y))).relu()


def inplace(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(torch.selu_(torch.matmul(torch.matmul(x, y), y))).relu()


# function, arguments, {operator: (times in forward's graph, times in backward's)}
CASES: dict[str, tuple[Callable[..., Tensor], int, dict[str, tuple[int, int]]]] = {
    "a function": (lambda x, y: again(one_matmul)(torch.sin(x), y), 2, {MM: (1, 3), SIGMOID: (1, 1)}),
    "two in a row": (in_a_row, 2, {MM: (2, 6)}),
    "a keyword": (with_a_keyword, 3, {MM: (2, 6)}),
    "a list among the arguments": (with_a_list, 3, {}),
    "matmuls again": (again(lambda x: torch.cos(torch.sin(torch.matmul(x, x) @ x))), 1, {MM: (2, 6)}),
    "matmuls kept": (again(lambda x: torch.cos(torch.sin(torch.matmul(x, x) @ x)), keeping(MM)), 1, {MM: (2, 4)}),
    "the last matmul kept": (again(two_matmuls, keeping(MM)), 2, {MM: (2, 4), SIGMOID: (1, 1)}),
    "a policy that is an object": (again(two_matmuls, TorchPolicy(KeepsMatmuls())), 2, {MM: (2, 4)}),
    "kept by number": (again(two_matmuls, DecisionTable({f"{MM}.default": [SAVE, RECOMPUTE]})), 2, {MM: (2, 5)}),
    "two operators kept": (again(outplace, keeping(MM, SIGMOID)), 2, {MM: (2, 4), SIGMOID: (1, 0)}),
    "in place": (again(inplace, keeping(MM, SIGMOID)), 2, {MM: (2, 4), SIGMOID: (1, 0)}),
    "an operator on a list": (again(lambda x, y: torch.cat([x, y]).sin()), 2, {CAT: (1, 1)}),
}


@pytest.mark.compat
@pytest.mark.parametrize("case", CASES)
def test_operators_in_the_graphs_of_forward_and_backward(case: str) -> None:
    fn, count, expected = CASES[case]
    graphs = compiled_counts(fn, *matrices(count))
    assert {name: graphs.forward[name] for name in expected} == {name: runs for name, (runs, _) in expected.items()}
    for name, (_, most) in expected.items():
        assert graphs.backward[name] == most, name


@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_a_random_operator_between_two_kept_ones(preserve_rng_state: bool) -> None:
    # A compiled region always replays its draws; an eager one would not without the state.
    def fn(x: Tensor) -> Tensor:
        return torch.sigmoid(torch.dropout(torch.sigmoid(x), 0.5, True))

    graphs, (x,) = Graphs(), matrices(1)
    run = torch.compile(
        again(fn, keeping(SIGMOID), preserve_rng_state=preserve_rng_state), backend=graphs.backend, fullgraph=True
    )
    assert_bitwise(slopes(run, x), slopes(fn, x))
    assert (graphs.forward[SIGMOID], graphs.backward[SIGMOID]) == (2, 0)


def test_a_module_with_parameters_and_another_size_of_input() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.0), nn.Linear(6, 6))
    run = torch.compile(again(module), backend="aot_eager", fullgraph=True)
    for rows in (4, 5, 7):
        x = torch.randn(rows, 6)
        assert_bitwise(slopes(run, x), slopes(module, x))


def test_a_parametrization_that_is_itself_a_region() -> None:
    policy = keeping(MM)

    class Squashed(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return checkpoint_region(lambda w: torch.sigmoid(w * w), weight, policy=policy)

    class PlainSquashed(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return torch.sigmoid(weight * weight)

    grads = []
    for parametrization, compile in itertools.product((Squashed, PlainSquashed), (False, True)):
        torch.manual_seed(0)
        linear = nn.Linear(16, 16, bias=False)
        nn.utils.parametrize.register_parametrization(linear, "weight", parametrization())
        run = torch.compile(linear, backend="aot_eager", fullgraph=True) if compile else linear
        run(torch.ones(8, 16)).sum().backward()
        grads.append(linear.parametrizations.weight.original.grad)
    assert_bitwise(grads, grads[-1:] * 4)


def breaking(x: Tensor) -> Tensor:
    out = torch.sin(x)
    torch._dynamo.graph_break()
    return torch.cos(out)


def test_a_break_in_the_region_runs_eagerly_or_is_an_error_as_asked() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cos(again(breaking)(torch.sin(x)))

    (x,) = matrices(1)
    assert_bitwise(slopes(torch.compile(fn, backend="aot_eager"), x), slopes(fn, x))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        torch.compile(fn, backend="aot_eager", fullgraph=True)(x)
