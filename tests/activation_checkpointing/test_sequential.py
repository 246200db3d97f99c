"""Segments of layers as one region: bitwise gradients, counted bytes, and models that call layers in their own way."""

import copy
import itertools
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing import apply_specs, is_checkpointed
from nemo_like.activation_checkpointing.engine import RegionError
from nemo_like.activation_checkpointing.legacy import names_in
from nemo_like.activation_checkpointing.sequential import SegmentMember
from nemo_like.activation_checkpointing.spec import segment_sizes, segments_of
from tests.checks import assert_bitwise, seeded
from tests.models.blocks import DroppingBlock, Layer, Stack


def apply_sequential_checkpointing(model, layers, segments=None, **options):
    """Segments of `layers`, which become what stands in the model afterwards; how many layers each segment has."""
    names = names_in(model, layers)
    specs = segments_of(names, segments, **options)
    placed = apply_specs(model, specs)
    layers[:] = [placed[name] for name in names]
    return [len(spec.members) for spec in specs]


def chain(layers: int, **options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[DroppingBlock(**options) for _ in range(layers)])


def step(model: nn.Module, *inputs) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes held between forward and backward, and the gradients."""
    model.zero_grad()
    torch.manual_seed(1)
    with LiveBytes() as meter:
        loss = model(*inputs).square().mean()
        held = meter.live
    loss.backward()
    return held, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_step(plain: nn.Module, segmented: nn.Module, *inputs) -> tuple[int, int]:
    (plain_held, wanted), (held, got) = step(plain, *inputs), step(segmented, *inputs)
    assert_bitwise(got, wanted)
    return plain_held, held


@pytest.mark.parametrize("segments", [1, 2, 3, 6, None])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_chain_keeps_the_inputs_of_its_segments(segments, dropout):
    plain = chain(6, dropout=dropout)
    segmented = copy.deepcopy(plain)
    layers = list(segmented)
    sizes = apply_sequential_checkpointing(segmented, layers, segments)
    assert sum(sizes) == 6 and len(sizes) == (2 if segments is None else segments)
    assert layers == list(segmented) and all(is_checkpointed(layer) for layer in layers)
    plain_held, held = assert_same_step(plain, segmented, torch.randn(32, 8))
    # What enters each segment but the first (whose input is there anyway), what leaves the last, and the loss.
    assert held == len(sizes) * 32 * 8 * 4 + 4
    assert held < 0.7 * plain_held
    assert segmented.state_dict().keys() == plain.state_dict().keys()


def own_loop(model, x: torch.Tensor) -> torch.Tensor:
    """Add to the stream between layers, pass one tensor to several, change one in place, and skip a layer if asked to."""
    bias = model.table.exp()
    for index, layer in enumerate(model.layers):
        if index == model.skip:
            continue
        x = layer(x, bias=bias if index % 2 else None)
        if index == 1:
            x = x * 2 + model.table[:8]
        if index == 2:
            x.add_(1)
    return x


@pytest.mark.parametrize("skip", [None, 0, 2, 3])
def test_what_happens_between_the_layers_is_kept_not_replayed(skip):
    layers, table = seeded(nn.ModuleList, (DroppingBlock() for _ in range(4))), nn.Parameter(torch.randn(32))
    plain = Layer(own_loop, layers=layers, table=table, skip=skip)
    segmented = copy.deepcopy(plain)
    apply_sequential_checkpointing(segmented, list(segmented.layers), 1)
    for _ in range(2):
        plain_held, held = assert_same_step(plain, segmented, torch.randn(16, 8))
        assert held < plain_held


def test_second_derivatives_through_segments():
    plain, x = chain(4), torch.randn(2, 8, requires_grad=True)
    segmented = copy.deepcopy(plain)
    apply_sequential_checkpointing(segmented, list(segmented), 2)

    def second(model):
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.square().sum(), list(model.parameters()))]

    assert_bitwise(second(segmented), second(plain))


def test_a_dropped_graph_takes_everything_with_it():
    class Mixing(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            middle = self.layers[0](x) * 2  # kept by the segment and made from its own output: no cycle may form
            self.seen = weakref.ref(middle)
            return self.layers[1](middle)

    model = Mixing([DroppingBlock(), DroppingBlock()])
    apply_sequential_checkpointing(model, list(model.layers), 1)
    with LiveBytes():  # in which Python's collector is off
        out = model(torch.randn(4, 8))
        del out
        assert model.seen() is None


def test_hooks_of_torch_on_a_layer_itself_run_once():
    """The power iteration of a spectral norm, in training, goes on with each call."""
    plain = nn.Sequential(*[nn.utils.spectral_norm(nn.Linear(8, 8)) for _ in range(4)])
    segmented = copy.deepcopy(plain)
    apply_sequential_checkpointing(segmented, list(segmented), 2)
    assert_same_step(plain, segmented, torch.randn(3, 8))


def test_without_gradients_and_in_lower_precision():
    plain = chain(4).to(torch.bfloat16)
    segmented = copy.deepcopy(plain)
    apply_sequential_checkpointing(segmented, list(segmented), 2)
    x = torch.randn(16, 8, dtype=torch.bfloat16)
    assert_same_step(plain, segmented, x)
    with torch.no_grad():
        assert torch.equal(plain(x), segmented(x))


def test_an_input_changed_in_place_is_an_error_naming_the_layer():
    segmented = chain(2)
    apply_sequential_checkpointing(segmented, list(segmented), 1)
    x = torch.randn(4, 8)
    loss = segmented(x).sum()
    x.add_(1)
    with pytest.raises(RegionError, match=r"Region '0'.*changed in place"):
        loss.backward()


def test_wrong_arguments_change_nothing():
    model = chain(3)
    modules = list(model)
    for layers, options, says in (
        (modules, {"segments": 0}, "segments is 0"),
        (modules, {"segments": 4}, "segments is 4"),
        (modules, {"segments": True}, "segments is True"),
        (modules, {"weights": [1, 2]}, "weights is"),
        (modules, {"weights": [1, 2, -1]}, "weights is"),
        ([*model, DroppingBlock()], {}, "not a sub-module"),
        ([], {}, "no layers"),
    ):
        with pytest.raises(ValueError, match=says):
            apply_sequential_checkpointing(model, layers, **options)
    assert list(model) == modules
    apply_sequential_checkpointing(model, list(model))
    with pytest.raises(TypeError, match="already checkpointed"):
        apply_sequential_checkpointing(model, list(model))
    assert not any(isinstance(m.forward.inner, SegmentMember) for m in model)


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(0, 20), min_size=1, max_size=8), data=st.data())
def test_weighted_segments_are_the_lightest_possible(weights, data):
    segments = data.draw(st.integers(1, len(weights)))
    sizes = segment_sizes(len(weights), segments, weights)
    assert len(sizes) == segments and sum(sizes) == len(weights) and min(sizes) >= 1

    def heaviest(borders) -> int:
        edges = [0, *borders, len(weights)]
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(edges))

    best = min(heaviest(borders) for borders in itertools.combinations(range(1, len(weights)), segments - 1))
    assert heaviest(list(itertools.accumulate(sizes))[:-1]) == best
