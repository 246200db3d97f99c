"""Regions in which autograd saves tensors that are not strided, and memory that is used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from nemo_like.activation_checkpointing import SelectivePolicy
from nemo_like.activation_checkpointing.engine import RegionError, run_region
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy, TorchPolicy
from tests.checks import assert_bitwise
from tests.models.blocks import gradients, region

POLICIES = [FullPolicy(), SelectivePolicy()]


def _graph(layout: str) -> Tensor:
    dense = (torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    return dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_matrix_that_autograd_saves(layout: str, policy: Policy) -> None:
    graph = _graph(layout)
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(6, 4, requires_grad=True)

    def convolution(nodes: Tensor) -> Tensor:
        return torch.sparse.mm(graph, (nodes @ weight).tanh()).relu()

    expected = torch.autograd.grad(convolution(x).square().sum(), [x, weight])
    out = run_region(convolution, (x,), {}, policy=policy)
    assert_bitwise(torch.autograd.grad(out.square().sum(), [x, weight]), expected)


INDICES = torch.tensor([[0, 1, 2, 5], [3, 0, 2, 1]])


def sparse_attention(nodes: Tensor) -> Tensor:
    scores = torch.sparse_coo_tensor(INDICES, (nodes[INDICES[0]] * nodes[INDICES[1]]).sum(-1), (6, 6))
    return torch.sparse.mm(torch.sparse.softmax(scores, 1), nodes)


def mkldnn_relu(value: Tensor) -> Tensor:
    return (value * 2).to_mkldnn().relu().to_dense() * value


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("function", [sparse_attention, mkldnn_relu])
def test_what_is_not_strided_and_made_inside(function: Callable[[Tensor], Tensor], policy: Policy) -> None:
    if function is mkldnn_relu and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no mkldnn")
    x, holder = torch.randn(6, 4), nn.Module()
    assert_bitwise(gradients(region(function, policy), holder, x), gradients(function, holder, x))


def test_another_number_of_changes_in_place_is_named() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    calls: list[int] = []

    def region(value: Tensor) -> Tensor:
        scratch = torch.ones(64, 64)
        for _ in calls:
            scratch.mul_(1.0)
        calls.append(1)
        return value * scratch

    out = run_region(region, (x,), {}, policy=FullPolicy())
    with pytest.raises(RegionError, match="changed in place 0 times in forward, and 1 by now"):
        out.sum().backward()


class Neighbours(nn.Module):
    """Has a sparse tensor among its attributes, and exchanges it where it `changes`."""

    def __init__(self, layout: str, buffer: bool, changes: bool) -> None:
        super().__init__()
        self.up, self.changes = nn.Linear(8, 8), changes
        if buffer:
            self.register_buffer("graph", _graph(layout))
        else:
            self.graph = _graph(layout)

    def forward(self, x: Tensor) -> Tensor:
        graph = self.graph
        if self.changes:
            self.graph = graph * 2
        return x + torch.sparse.mm(graph, self.up(x).tanh())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("changes", [False, True], ids=["constant", "changes"])
@pytest.mark.parametrize("buffer", [False, True], ids=["attribute", "buffer"])
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_a_sparse_matrix_among_the_attributes(policy: Policy, layout: str, buffer: bool, changes: bool) -> None:
    layer, bare = Neighbours(layout, buffer, changes), Neighbours(layout, buffer, changes)
    bare.up.load_state_dict(layer.up.state_dict())
    x = torch.randn(6, 8)
    for _ in range(3):
        assert_bitwise(gradients(region(layer, policy), layer, x), gradients(bare, bare, x))
    assert torch.equal(layer.graph.to_dense(), bare.graph.to_dense())


class Sized(Tensor):
    """A subclass that is asked for its sizes through dispatch."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Sized:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), inner.stride(), dtype=inner.dtype, dispatch_sizes_strides_policy="sizes",
            requires_grad=inner.requires_grad,
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*tree_map_only(cls, lambda t: t.inner, args), **(kwargs or {}))
        return tree_map_only(Tensor, cls, out)


@pytest.mark.parametrize(
    "policy",
    [FullPolicy(), TorchPolicy(lambda context, op, *args, **kwargs: op is torch.ops.aten.sym_size.default)],
    ids=["full", "sizes"],
)
def test_a_subclass_whose_sizes_are_dispatched(policy: Policy) -> None:
    def fn(t: Tensor) -> Tensor:
        return (t * t.sum()).view(-1).view(4, 3).exp()

    values = torch.randn(4, 3)
    plain, sized = values.clone().requires_grad_(), Sized(values.clone().requires_grad_())
    got = torch.autograd.grad(run_region(fn, (sized,), {}, policy=policy).sum(), sized)[0]
    assert torch.equal(got.inner, torch.autograd.grad(fn(plain).sum(), plain)[0])  # type: ignore[attr-defined]
