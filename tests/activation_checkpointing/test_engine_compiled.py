"""Regions inside what is compiled: how often an operator is in the graphs of forward and backward, and what breaks.

Cases of PyTorch's `test/dynamo/test_activation_checkpointing.py` among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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


def only_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def four_matmuls(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(4):
        x = nn.functional.gelu(x @ y)
    return x


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


def inplace(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(torch.selu_(torch.matmul(torch.matmul(x, y), y))).relu()


# function, arguments, {operator: (times in forward's graph, times in backward's)}
CASES: dict[str, tuple[Callable[..., Tensor], int, dict[str, tuple[int, int]]]] = {
    "one": (lambda x, y: again(one_matmul)(torch.sin(x), y), 2, {MM: (1, 3), SIGMOID: (1, 1)}),
    "two in a row": (in_a_row, 2, {MM: (2, 6)}),
    "a keyword": (with_a_keyword, 3, {MM: (2, 6)}),
    "a list among the arguments": (with_a_list, 3, {}),
    "four matmuls kept": (again(four_matmuls, keeping(MM)), 2, {MM: (4, 8)}),
    "every second one of four": (again(four_matmuls, SelectivePolicy()), 2, {MM: (4, 10)}),
    "four matmuls again": (again(four_matmuls), 2, {MM: (4, 12)}),
    "the last matmul kept": (again(two_matmuls, keeping(MM)), 2, {MM: (2, 4), SIGMOID: (1, 1)}),
    "kept by a function": (again(two_matmuls, TorchPolicy(only_matmuls)), 2, {MM: (2, 4)}),
    "kept by number": (again(two_matmuls, DecisionTable({f"{MM}.default": [SAVE, RECOMPUTE]})), 2, {MM: (2, 5)}),
    "in place": (again(inplace, keeping(MM, SIGMOID)), 2, {MM: (2, 4), SIGMOID: (1, 0)}),
    "an operator on a list": (again(lambda x, y: torch.cat([x, y]).sin()), 2, {CAT: (1, 1)}),
}


@pytest.mark.compat
@pytest.mark.parametrize("case", CASES)
def test_operators_in_the_graphs_of_forward_and_backward(case: str) -> None:
    fn, count, expected = CASES[case]
    graphs = compiled_counts(fn, *matrices(count))
    assert {name: graphs.forward[name] for name in expected} == {name: runs for name, (runs, _) in expected.items()}
    assert {name: graphs.backward[name] for name in expected} == {name: runs for name, (_, runs) in expected.items()}


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
