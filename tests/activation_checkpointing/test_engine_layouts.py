"""Regions in which autograd saves tensors that are not strided, and memory that is used again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nemo_like.activation_checkpointing import SelectivePolicy
from nemo_like.activation_checkpointing.engine import RegionError, run_region
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy
from tests.checks import assert_bitwise
from tests.models.blocks import gradients, region

POLICIES = [FullPolicy(), SelectivePolicy()]


def _graph(layout: str) -> torch.Tensor:
    dense = (torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    return dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_matrix_that_autograd_saves(layout: str, policy: Policy) -> None:
    graph = _graph(layout)
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(6, 4, requires_grad=True)

    def convolution(nodes: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(graph, (nodes @ weight).tanh()).relu()

    expected = torch.autograd.grad(convolution(x).square().sum(), [x, weight])
    out = run_region(convolution, (x,), {}, policy=policy)
    actual = torch.autograd.grad(out.square().sum(), [x, weight])
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_a_sparse_matrix_made_inside(policy: Policy) -> None:
    x = torch.randn(6, 4, requires_grad=True)
    indices = torch.tensor([[0, 1, 2, 5], [3, 0, 2, 1]])

    def attention(nodes: torch.Tensor) -> torch.Tensor:
        scores = torch.sparse_coo_tensor(indices, (nodes[indices[0]] * nodes[indices[1]]).sum(-1), (6, 6))
        return torch.sparse.mm(torch.sparse.softmax(scores, 1), nodes)

    (expected,) = torch.autograd.grad(attention(x).square().sum(), x)
    (actual,) = torch.autograd.grad(run_region(attention, (x,), {}, policy=policy).square().sum(), x)
    assert torch.equal(actual, expected)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no mkldnn")
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_an_mkldnn_tensor(policy: Policy) -> None:
    x = torch.randn(2, 8, requires_grad=True)

    def relu(value: torch.Tensor) -> torch.Tensor:
        return (value * 2).to_mkldnn().relu().to_dense() * value

    (expected,) = torch.autograd.grad(relu(x).sum(), x)
    (actual,) = torch.autograd.grad(run_region(relu, (x,), {}, policy=policy).sum(), x)
    assert torch.equal(actual, expected)


def test_another_number_of_changes_in_place_is_named() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    calls: list[int] = []

    def region(value: torch.Tensor) -> torch.Tensor:
        scratch = torch.ones(64, 64)
        for _ in calls:
            scratch.mul_(1.0)
        calls.append(1)
        return value * scratch

    out = run_region(region, (x,), {}, policy=FullPolicy())
    with pytest.raises(RegionError, match="changed in place 0 times in forward, and 1 by now"):
        out.sum().backward()


def test_a_change_of_a_tensor_that_lives_on_is_still_noticed() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(2, 4, requires_grad=True)
    out = run_region(lambda value: (value @ weight.t()).sin(), (x,), {}, policy=FullPolicy())
    with torch.no_grad():
        weight.mul_(2)
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
