"""Regions that change their own inputs in place, whose saved tensors are not strided, or whose memory is used again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from nemo_like.activation_checkpointing import SelectivePolicy
from nemo_like.activation_checkpointing.engine import RegionError
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy, TorchPolicy
from tests.checks import assert_bitwise
from tests.models.blocks import Layer, checkpoint_region, gradients, region

D = 8
POLICIES = [FullPolicy(), SelectivePolicy(), SelectivePolicy(every_nth_matmul=None)]


class Noisy(nn.Module):
    """Its noise comes in place, and from the second call on only if it says so: `learnt` from the first is not enough."""

    def __init__(self, *on: int) -> None:
        super().__init__()
        self.linear, self.on, self.calls = nn.Linear(D, D), on, 0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.calls in self.on:
            x *= torch.empty_like(x).uniform_(0.9, 1.1) if scale is None else scale
        self.calls += 1
        return self.linear(x).tanh() * x


def _train(policy: Policy | None, *on: int, backwards: int = 1) -> list[Tensor | None]:
    """Gradients of three steps, in which the noise is `on` in those of these numbers."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(D, D), Noisy(*on), nn.Linear(D, D)])
    first, noisy, second = model
    run = noisy if policy is None else region(noisy, policy)
    for _ in range(3):
        h = first(torch.randn(3, D))
        loss = second(run(h) + h).square().sum()
        for _ in range(backwards):
            loss.backward(retain_graph=True)
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_of_the_bare_model(policy: Policy, backwards: int) -> None:
    assert_bitwise(_train(policy, 0, 1, 2, backwards=backwards), _train(None, 0, 1, 2, backwards=backwards))


def test_a_policy_that_keeps_something_notices_a_late_change_too() -> None:
    assert_bitwise(_train(SelectivePolicy(), 2), _train(None, 2))


def _shared_memory() -> None:
    base = nn.Linear(D, D)(torch.ones(4, D))  # inputs that share memory are not copied apart
    region(Noisy(0), FullPolicy())(base[:2], base[:2].detach()).sum().backward()


def _by_the_caller() -> None:
    h = nn.Linear(D, D)(torch.ones(2, D))
    loss = region(Noisy(), FullPolicy())(h).sum()
    h.mul_(2)
    loss.backward()


# The first is late: operators are no longer watched.
@pytest.mark.parametrize("change", [lambda: _train(FullPolicy(), 2), _shared_memory, _by_the_caller])
def test_a_change_that_cannot_be_made_again_is_an_error(change: Callable[[], Any]) -> None:
    with pytest.raises(RegionError, match="one of its inputs was changed in place"):
        change()


def _attention(layer: Any, query: Tensor, key: Tensor) -> Tensor:
    """Take another way where one tensor is given in two places; a write into one is seen in the other."""
    if layer.writes:
        query *= 1.5
    return layer.one(query).tanh() * key if query is key else layer.other(query + key)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_tensor_in_two_places_is_one_in_recomputation(policy: Policy, hooks: bool, writes: bool) -> None:
    twice, x = Layer(_attention, one=nn.Linear(D, D), other=nn.Linear(D, D), writes=writes), torch.randn(3, D)
    ours = region(twice, policy)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if hooks else contextlib.nullcontext():
        assert_bitwise(gradients(lambda h: ours(h, h), twice, x), gradients(lambda h: twice(h, h), twice, x))


LAYOUT_POLICIES = [FullPolicy(), SelectivePolicy()]
GRAPH = (torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) > 0.5).float()
INDICES = torch.tensor([[0, 1, 2, 5], [3, 0, 2, 1]])
LAYOUTS = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr}


def _sparse_attention(nodes: Tensor) -> Tensor:
    scores = torch.sparse_coo_tensor(INDICES, (nodes[INDICES[0]] * nodes[INDICES[1]]).sum(-1), (6, 6))
    return torch.sparse.mm(torch.sparse.softmax(scores, 1), nodes)


def _mkldnn_relu(value: Tensor) -> Tensor:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no mkldnn")
    return (value * 2).to_mkldnn().relu().to_dense() * value


@pytest.mark.parametrize("policy", LAYOUT_POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("function", [_sparse_attention, _mkldnn_relu])
def test_what_is_not_strided_and_made_inside(function: Callable[[Tensor], Tensor], policy: Policy) -> None:
    x, holder = torch.randn(6, 4), nn.Module()
    assert_bitwise(gradients(region(function, policy), holder, x), gradients(function, holder, x))


def _neighbours(layer: Any, x: Tensor) -> Tensor:
    """With a sparse tensor, which autograd saves, and which is exchanged where the layer `changes`."""
    graph = layer.graph
    if layer.changes:
        layer.graph = graph * 2
    return x + torch.sparse.mm(graph, layer.up(x).tanh()).relu()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("changes", [False, True], ids=["constant", "changes"])
@pytest.mark.parametrize("place", ["attribute", "buffer"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", LAYOUT_POLICIES, ids=lambda p: type(p).__name__)
def test_a_sparse_matrix_that_autograd_saves(policy: Policy, layout: str, place: str, changes: bool) -> None:
    layer, bare = (
        Layer(_neighbours, up=nn.Linear(8, 8), changes=changes, graph=nn.Buffer(graph) if place == "buffer" else graph)
        for graph in (LAYOUTS[layout](GRAPH) for _ in range(2))
    )
    bare.up.load_state_dict(layer.up.state_dict())
    x = torch.randn(6, 8)
    for _ in range(3):
        assert_bitwise(gradients(region(layer, policy), layer, x), gradients(bare, bare, x))
    assert torch.equal(layer.graph.to_dense(), bare.graph.to_dense())


def _changes_scratch(x: Tensor, number: int) -> Tensor:
    scratch = torch.ones(8)
    for _ in range(number):
        scratch.mul_(1.0)
    return x * scratch


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_changes_scratch, r"layers\.4.*changed in place 0 times in forward, and 1 by now"),
        (lambda x, number: x[: 3 + number].exp().sin(), r"layers\.4.*shape \(3,\).*has \(4,\)"),
    ],
)
def test_another_number_of_changes_or_another_shape_is_named(function: Callable[..., Tensor], message: str) -> None:
    x, calls = torch.randn(8, requires_grad=True), iter(range(2))
    out = checkpoint_region(lambda t: function(t, next(calls)), x, policy=FullPolicy(), name="layers.4")
    with pytest.raises(RegionError, match=message):
        out.sum().backward()


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


SIZES = TorchPolicy(lambda context, op, *args, **kwargs: op is torch.ops.aten.sym_size.default)


@pytest.mark.parametrize("policy", [FullPolicy(), SIZES], ids=["full", "sizes"])
def test_a_subclass_whose_sizes_are_dispatched(policy: Policy) -> None:
    def fn(t: Tensor) -> Tensor:
        return (t * t.sum()).view(-1).view(4, 3).exp()

    values = torch.randn(4, 3)
    plain, sized = values.clone().requires_grad_(), Sized(values.clone().requires_grad_())
    (got,) = torch.autograd.grad(checkpoint_region(fn, sized, policy=policy).sum(), sized)
    assert torch.equal(got.inner, torch.autograd.grad(fn(plain).sum(), plain)[0])  # type: ignore[attr-defined]
