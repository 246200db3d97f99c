"""Regions in which autograd saves tensors that are not strided, and memory that is used again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nemo_like.activation_checkpointing import SelectivePolicy
from nemo_like.activation_checkpointing.engine import RegionError, run_region
from nemo_like.activation_checkpointing.engine.region import Region
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy
from tests.models.blocks import assert_bitwise, gradients, region

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


def test_memory_that_is_used_again_is_not_taken_for_a_tensor_that_changed() -> None:
    """The next tensor of the same size gets the freed address; with another version it must not look changed."""
    x = torch.randn(64, 64, requires_grad=True)
    addresses = []

    def region(value: torch.Tensor) -> torch.Tensor:
        scratch = torch.ones(64, 64)
        for _ in range(len(addresses)):  # another number of changes in place in every run
            scratch.mul_(1.0)
        addresses.append(scratch.data_ptr())
        return value * scratch

    for _ in range(50):
        addresses.clear()
        out = run_region(region, (x,), {}, policy=FullPolicy())
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(gradient, torch.ones(64, 64))
        if addresses[0] == addresses[1]:
            return
    pytest.skip("the allocator never gave out the same address twice")


def test_a_freed_storage_is_never_taken_for_another() -> None:
    tensor = torch.ones(1000)
    region = Region(torch.sin, FullPolicy(), "", None, True)
    region.pack(tensor)
    assert region.storages.is_of(0, tensor) and region.storages.is_of(0, tensor.view(10, 100))
    del tensor
    assert not any(region.storages.is_of(0, torch.ones(1000)) for _ in range(50))


def test_a_change_of_a_tensor_that_lives_on_is_still_noticed() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(2, 4, requires_grad=True)
    out = run_region(lambda value: (value @ weight.t()).sin(), (x,), {}, policy=FullPolicy())
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RegionError, match="was changed in place between forward and backward"):
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
