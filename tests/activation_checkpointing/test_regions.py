"""Regions and the functions that put them in place: names, lists, shared blocks, refusals."""

import copy
import pickle

import pytest
import torch
from torch import nn

from nemo_like import apply_activation_checkpointing
from nemo_like.activation_checkpointing import (
    SELECTIVE_AC_WRAPPER_FLAG,
    CheckpointWrapper,
    SelectivePolicy,
    apply_full_layer_checkpointing_to_layers,
    apply_selective_checkpointing_to_layers,
    apply_submodule_checkpointing,
    is_checkpointed,
    is_selective_activation_checkpointing,
)
from tests.checks import assert_bitwise, step
from tests.models.blocks import Layer, Stack
from tests.models.decoders import PlainDecoder, batch, build

pytestmark = pytest.mark.compat


def _apply(mode: str, model: nn.Module) -> list[nn.Module]:
    layers = list(model.blocks)
    if mode == "full":
        apply_full_layer_checkpointing_to_layers(model, layers)
    elif mode == "selective":
        apply_selective_checkpointing_to_layers(model, layers, False)
    else:
        apply_submodule_checkpointing(layers, False)
    return layers


@pytest.mark.parametrize("mode", ["full", "selective", "submodule"])
def test_a_state_dict_of_any_mode_loads_in_any_other(mode: str) -> None:
    source, target, bare = build("plain", seed=1), build("plain", seed=2), build("plain", seed=3)
    _apply(mode, source)
    _apply("selective", target)
    for model in (target, bare):
        assert model.load_state_dict(source.state_dict()) == ([], [])
        assert_bitwise(list(model.parameters()), list(source.parameters()))


def test_layers_are_flagged_and_stay_the_modules_that_they_are() -> None:
    model = PlainDecoder()
    before = list(model.modules())
    layers = _apply("selective", model)
    assert list(model.modules()) == before
    for layer in layers:
        assert is_checkpointed(layer) and getattr(layer, SELECTIVE_AC_WRAPPER_FLAG) is True
        assert layer.forward.name.startswith("blocks.") and repr(layer.forward) == "PlainBlock (selective)"
    full = _apply("full", PlainDecoder())[0]
    assert not hasattr(full, SELECTIVE_AC_WRAPPER_FLAG) and repr(full.forward) == "PlainBlock (full)"


def test_a_callers_wrapper_reads_through_to_the_module_and_survives_a_copy() -> None:
    wrapped = CheckpointWrapper(nn.Linear(2, 3), policy=SelectivePolicy())
    assert wrapped.out_features == 3 and wrapped.weight is wrapped.weight
    assert CheckpointWrapper(nn.Sequential(nn.Linear(2, 3)))[0].in_features == 2
    twin = copy.deepcopy(wrapped)
    twin(torch.ones(1, 2)).sum().backward()
    assert twin.weight.grad is not None and wrapped.weight.grad is None


def test_a_looped_block_is_one_region_in_every_place() -> None:
    # Known failure 18.
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = Stack([shared, nn.Linear(4, 4), shared])
    reference, layers = copy.deepcopy(model), model.layers
    apply_full_layer_checkpointing_to_layers(model, [layers[0]])
    assert layers[0] is layers[2] and is_checkpointed(layers[0])
    assert_bitwise(step(model, torch.ones(2, 4)), step(reference, torch.ones(2, 4)))


def test_the_registered_child_is_replaced_and_not_its_alias() -> None:
    # Known failure 10: a property that aliases the child must not hide it from the replacement.
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attention = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        mlp = self_attn = property(lambda self: self.self_attention)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.self_attn(x)

    block = Block()
    names = [n for n, _ in block.named_parameters()]
    apply_submodule_checkpointing([block], False)
    assert is_checkpointed(block.self_attention) and block.self_attn is block.mlp is block.self_attention
    assert type(block.self_attention) is nn.Sequential
    assert [n for n, _ in block.named_parameters()] == names


def test_bad_layers_are_refused_and_nothing_changes() -> None:
    model = PlainDecoder()
    before = list(model.blocks)
    with pytest.raises(ValueError, match=r"layers\[1\], a Linear, is not a sub-module"):
        apply_full_layer_checkpointing_to_layers(model, [model.blocks[0], nn.Linear(2, 2)])
    assert list(model.blocks) == before
    with pytest.raises(ValueError, match="no MLP, attention or norm"):
        apply_submodule_checkpointing([model.blocks[0], nn.Sequential(nn.Linear(2, 2))], False)
    assert not any(is_checkpointed(m) for m in model.modules())
    _apply("selective", model)
    for mode in ("full", "selective"):
        with pytest.raises(TypeError, match="already checkpointed"):
            _apply(mode, model)
    with pytest.raises(TypeError, match=r"module is an int; it must be a torch\.nn\.Module"):
        CheckpointWrapper(3)
    with pytest.raises(ValueError, match="use_reentrant=True keeps nothing"):
        CheckpointWrapper(nn.Linear(2, 2), True, policy=SelectivePolicy())


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_is_set_on_a_checkpointed_layer_is_what_runs(mode: str) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(
        [Layer(lambda own, x: own.inside(x) * own.gain, inside=nn.Linear(2, 2), gain=1.0, policy="of the layer itself")]
    )
    (layer,) = _apply(mode, model)
    new = nn.Linear(2, 2)
    layer.gain, layer.inside = 3.0, new  # as an adapter library does, which finds the layer by its name
    assert list(model.state_dict()) == ["blocks.0.inside.weight", "blocks.0.inside.bias"]
    x = torch.ones(1, 2)
    assert torch.equal(layer(x), new(x) * 3.0)
    assert layer.policy == "of the layer itself"


@pytest.mark.parametrize("ac", ["full", "selective", "submodule", "sequential"])
def test_a_model_can_be_pickled_before_and_after_a_step(ac: str) -> None:
    model = apply_activation_checkpointing(PlainDecoder(), ac)
    for _ in range(2):
        again = pickle.loads(pickle.dumps(model))
        assert_bitwise(step(again, batch(2)), step(model, batch(2)))
        assert [type(m) for m in model.modules()] == [type(m) for m in again.modules()]


def test_reentrant_gives_the_same_gradients() -> None:
    reference, model = build("plain"), build("plain")
    for index, block in enumerate(model.blocks):
        model.blocks[index] = CheckpointWrapper(block, use_reentrant=True)
    assert_bitwise(step(model, batch(2), seed=5), step(reference, batch(2), seed=5))
    # Known failure 7: torch would warn and train nothing.
    with pytest.raises(RuntimeError, match=r"layers\.0 has weights to train and no input that requires a gradient"):
        CheckpointWrapper(nn.Linear(2, 2), use_reentrant=True, name="layers.0")(torch.ones(1, 2))
    CheckpointWrapper(nn.Linear(2, 2).requires_grad_(False), use_reentrant=True)(torch.ones(1, 2))


def test_reentrant_takes_tensors_by_keyword_and_refuses_those_it_cannot_see() -> None:
    class Scaled(nn.Module):
        def forward(self, x, scale=None, at=None, more=()):  # type: ignore[no-untyped-def]
            picked = x[at] if isinstance(at, torch.Tensor) else x
            return (picked if scale is None else picked * scale).exp() + sum(more)

    x, scale = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    at, more = torch.tensor([2, 0, 1]), (torch.ones(3),)
    wanted = torch.autograd.grad(Scaled()(x, scale, at, more).sum(), (x, scale))
    wrapped = CheckpointWrapper(Scaled(), name="layers.0", use_reentrant=True)
    keywords = {"more": more, "at": at, "scale": scale}
    for call in (lambda: wrapped(x, **keywords), lambda: wrapped(**keywords, x=x)):
        for tensor in (x, scale):
            tensor.grad = None
        call().sum().backward()
        assert torch.equal(x.grad, wanted[0]) and torch.equal(scale.grad, wanted[1])
    for arguments in ({"more": (scale * 2,)}, {"more": [{"inner": scale}]}):
        with pytest.raises(TypeError, match=r"layers\.0 was called with a tensor that requires a gradient inside"):
            wrapped(x, **arguments)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("selective", True), ("SELECTIVE", True), (" Selective ", True), ("full", False), (True, False), (None, False)],
)
def test_is_selective(value: object, expected: bool) -> None:
    assert is_selective_activation_checkpointing(value) is expected
