"""Which parameter belongs to which unit, and what is refused before anything changes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nemo_like.activation_checkpointing.legacy import CheckpointWrapper
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.shard import shard_layers
from nemo_like.distributed.units import UnitPlan, plan_units
from nemo_like.layers import Layer
from nemo_like.options import FSDP2
from tests.models.tiny import Decoder
from tests_distributed.fake import fake_rank


def _ids(params: Any) -> list[int]:
    return [id(param) for param in params]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_parameter_has_exactly_one_owner(data: st.DataObject) -> None:
    """Under any mixture of ties, frozen and odd parameters, storage dtypes and wrappers; and FSDP2 takes the plan."""
    model = Decoder(layers=data.draw(st.integers(1, 4)), width=4, tied=data.draw(st.booleans()))
    blocks = list(model.layers)
    for _ in range(data.draw(st.integers(0, 3))):
        one, other = data.draw(st.sampled_from(blocks)), data.draw(st.sampled_from(blocks))
        one.up.weight = other.up.weight
    if data.draw(st.booleans()):
        model.layers[-1] = blocks[0]  # a looped block
    for block in blocks:
        if data.draw(st.booleans()):
            block.norm.to(torch.bfloat16)
        if data.draw(st.integers(0, 3)) == 0:
            block.requires_grad_(False)
    wrapped = {block: CheckpointWrapper(block) if data.draw(st.booleans()) else block for block in model.layers}
    model.layers = nn.ModuleList(wrapped[block] for block in model.layers)
    frozen_sharding = data.draw(st.sampled_from(["root", "per_layer", "replicate"]))

    plan = plan_units(model, list(model.layers), frozen_sharding=frozen_sharding)
    owned = [i for unit in plan.units for i in _ids(unit.params)]
    assert sorted(owned + _ids(plan.replicated)) == sorted(_ids(model.parameters()))
    for unit in plan.units:
        assert len({p.dtype for p in unit.params if p.requires_grad}) <= 1
        assert set(_ids(unit.params)) <= {id(p) for module in unit.modules for p in module.parameters()}

    with fake_rank(0, 2):
        options = FSDP2(frozen_sharding=frozen_sharding)
        shard_layers(model, list(model.layers), build_mesh(device_type="cpu"), options=options)
    replicated = set(_ids(plan.replicated))
    assert all(isinstance(p, DTensor) != (id(p) in replicated) for p in model.parameters())


def test_groups_decide_which_frozen_layers_are_a_tower() -> None:
    model = nn.ModuleDict({"eye": nn.ModuleList([nn.Linear(2, 2)]), "words": nn.ModuleList([nn.Linear(2, 2)])})
    model.requires_grad_(False)
    eye, words = model["eye"][0], model["words"][0]
    layers = [Layer("eye.0", eye, "vision"), Layer("words.0", words, "language")]
    assert _layers_of(plan_units(model, layers)) == [words]  # a frozen language model runs on every rank
    assert _layers_of(plan_units(model, [eye, words])) == [
        eye,
        words,
    ]  # all frozen, no groups: one stack like any other
    words.requires_grad_(True)
    assert _layers_of(plan_units(model, [eye, words])) == [words]


def _layers_of(plan: UnitPlan) -> list[nn.Module]:
    return [unit.modules[0] for unit in plan.layers]


def test_the_head_is_told_from_a_projector() -> None:
    """The model's only linear layer of its own is a projector beside a decoder."""
    model = nn.ModuleDict({"decoder": Decoder(layers=2), "projector": nn.Linear(16, 16)})
    tail = plan_units(model, list(model.decoder.layers)).tail
    assert tail is not None and tail.modules == (model.decoder.norm, model.decoder.head)
    del model.decoder.head
    assert plan_units(model, list(model.decoder.layers)).tail is None


def test_the_tail_can_be_named_or_left_out() -> None:
    model = Decoder()
    assert plan_units(model, list(model.layers), tail=None).tail is None
    named = plan_units(model, list(model.layers), tail=[model.head]).tail
    assert named is not None and named.modules == (model.head,)
    wrong: list[tuple[Any, str]] = [
        ([model.layers[0].up], r"tail module 'layers\.0\.up' overlaps a layer"),
        ("head", "tail is 'head'; it must be 'auto'"),
        ([nn.Linear(2, 2)], "tail has a Linear that is not in the model"),
    ]
    for tail, message in wrong:
        with pytest.raises(ValueError, match=message):
            plan_units(model, list(model.layers), tail=tail)


@pytest.mark.parametrize(
    ("layers", "options", "kind", "message"),
    [
        (lambda m: [], {}, ValueError, "no layers to shard"),
        (lambda m: [Decoder().layers[0]], {}, ValueError, r"layers\[0\], a Block, is not in the model"),
        (lambda m: [m], {}, ValueError, r"layers\[0\] is the model itself"),
        (lambda m: [m.layers], {}, ValueError, r"layers\[0\], 'layers', is a container"),
        (lambda m: [m.layers[0], m.layers[0].up], {}, ValueError, r"'layers\.0\.up' is inside layer 'layers\.0'"),
        (lambda m: ["layers.0"], {}, TypeError, r"layers\[0\] is a str"),
        (None, {"forward_prefetch": -1}, ValueError, "forward_prefetch is -1"),
        (None, {"backward_prefetch": True}, ValueError, "backward_prefetch is True"),
        (None, {"reshard_after_forward": 3}, ValueError, r"must divide the shard axis of 8 ranks \(2, 4\)"),
        (None, {"reshard_after_forward": 8}, ValueError, "must divide the shard axis of 8 ranks"),
        (None, {"reshard_after_forward": "yes"}, TypeError, "reshard_after_forward is 'yes'"),
        (None, {"frozen_sharding": "none"}, ValueError, "must be one of root, replicate, per_layer"),
    ],
)
def test_bad_arguments_change_nothing(layers: Any, options: dict, kind: type, message: str) -> None:
    model = Decoder()
    before = dict(model.named_parameters())
    with fake_rank(0, 8):
        mesh = build_mesh(device_type="cpu")
        with pytest.raises(kind, match=message):
            shard_layers(model, list(model.layers) if layers is None else layers(model), mesh, options=FSDP2(**options))
    assert dict(model.named_parameters()) == before
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


def test_an_embedding_that_is_not_the_input_belongs_to_the_root() -> None:
    """SAM's mask tokens, whose weight its decoder reads without calling them, are as many as its last linear has outputs."""
    model = Decoder()
    model.get_input_embeddings = lambda: model.norm  # type: ignore[assignment]
    assert plan_units(model, list(model.layers)).embedding is None


def test_a_trainable_scalar_and_a_second_call_are_refused() -> None:
    with fake_rank(0, 2):
        mesh, model = build_mesh(device_type="cpu"), Decoder()
        model.layers[0].gain = nn.Parameter(torch.tensor(1.0))
        with pytest.raises(ValueError, match=r"'layers\.0\.gain' is a trainable scalar"):
            shard_layers(model, list(model.layers), mesh)
        model = Decoder()
        shard_layers(model, list(model.layers), mesh)
        with pytest.raises(ValueError, match="sharded already"):
            shard_layers(model, list(model.layers), mesh)
        with pytest.raises(TypeError, match="must be a torch DeviceMesh"):
            shard_layers(model := Decoder(), list(model.layers), None)
