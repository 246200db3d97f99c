"""Which modules are a model's layers, in which group, and what a scope selects. Everything on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule

from nemo_like._util.module_tree import bare_name, glob_to_regex
from nemo_like.layers import Layer, LayersNotFoundError, find_layers, is_frozen, layer_groups, select_layers
from nemo_like.layers.structure import weighted_parts

DIM = 8


class Block(nn.Module):
    """Norm, attention and MLP by name only: finding never calls anything."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attn = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.attn(self.norm(x)))


class OtherBlock(Block):
    """Another class in the same list: a state-space block between attention blocks."""


class MoEBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)) for _ in range(4))


class Holder(nn.Module):
    """A model made of whatever children it is given."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, DIM)
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def blocks(count: int, kind: type[nn.Module] = Block) -> nn.ModuleList:
    return nn.ModuleList(kind() for _ in range(count))


def fqns(model: nn.Module, layers: object = None) -> list[str]:
    return [layer.fqn for layer in find_layers(model, layers)]  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def on_meta():
    with torch.device("meta"):
        yield


# ------------------------------------------------------------------------------------------------- plain PyTorch models


def test_module_list() -> None:
    model = Holder(blocks=blocks(3), head=nn.Linear(DIM, 4))
    found = find_layers(model)
    assert [layer.fqn for layer in found] == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(layer.module is model.blocks[i] and layer.group == "language" for i, layer in enumerate(found))


@pytest.mark.parametrize("names", [("0", "1"), ("4", "5"), ("enc", "dec")])
def test_module_dict_as_pipeline_splits_leave_it(names: tuple[str, str]) -> None:
    assert fqns(Holder(layers=nn.ModuleDict({name: Block() for name in names}))) == [f"layers.{name}" for name in names]


def test_digit_keyed_children_of_a_bare_module() -> None:
    namespace = nn.Module()
    for index in (4, 5, 6):
        namespace.add_module(str(index), Block())
    assert fqns(Holder(layers=namespace)) == ["layers.4", "layers.5", "layers.6"]


def test_one_layer_left_in_a_list() -> None:
    assert fqns(Holder(layers=nn.ModuleDict({"7": Block()}))) == ["layers.7"]


def test_sequential_of_blocks_between_embedding_and_head() -> None:
    model = nn.Sequential(nn.Embedding(4, DIM), Block(), Block(), nn.LayerNorm(DIM), nn.Linear(DIM, 4))
    assert fqns(model) == ["1", "2"]


def test_numbered_attributes() -> None:
    assert fqns(Holder(block1=Block(), block2=Block())) == ["block1", "block2"]


def test_nested_lists() -> None:
    model = Holder(stages=nn.ModuleList([blocks(2), blocks(3)]))
    assert fqns(model) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", "stages.1.2"]


def test_blocks_of_stages_not_the_stages() -> None:
    stages = nn.ModuleList(Holder(blocks=blocks(4)) for _ in range(2))
    for stage in stages:
        stage.embed = nn.Identity()
    assert fqns(Holder(stages=stages)) == [f"stages.{s}.blocks.{b}" for s in range(2) for b in range(4)]


def test_hybrid_list_keeps_every_kind() -> None:
    model = Holder(layers=nn.ModuleList([Block(), OtherBlock(), Block(), MoEBlock()]))
    assert fqns(model) == ["layers.0", "layers.1", "layers.2", "layers.3"]


def test_experts_are_part_of_their_block() -> None:
    assert fqns(Holder(layers=blocks(3, MoEBlock))) == ["layers.0", "layers.1", "layers.2"]


def test_two_towers_and_a_list_of_heads() -> None:
    heads = nn.ModuleList(nn.Linear(DIM, 2) for _ in range(3))
    model = Holder(image_encoder=Holder(blocks=blocks(2)), text_decoder=Holder(blocks=blocks(3)), heads=heads)
    groups = layer_groups(model)
    assert {group: len(modules) for group, modules in groups.items()} == {"vision": 2, "language": 3}


def test_shared_block_once() -> None:
    shared = Block()
    assert fqns(Holder(layers=nn.ModuleList([shared] * 12))) == ["layers.0"]


def test_same_list_under_two_names_once() -> None:
    layers = blocks(2)
    model = Holder(decoder=Holder(layers=layers), layers=layers)
    assert fqns(model) == ["decoder.layers.0", "decoder.layers.1"]


def test_alias_property_is_not_followed() -> None:
    class Aliased(Holder):
        @property
        def layers(self) -> nn.ModuleList:
            return self.inner.layers

    assert fqns(Aliased(inner=Holder(layers=blocks(2)))) == ["inner.layers.0", "inner.layers.1"]


def test_torch_transformers() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, 2, 8), 3, enable_nested_tensor=False)
    assert fqns(encoder) == ["layers.0", "layers.1", "layers.2"]
    both = nn.Transformer(DIM, 2, 2, 2, 8)
    assert fqns(both) == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]


def test_diffusion_transformer() -> None:
    """As diffusers writes them: two lists of two block classes, named in ``_no_split_modules``."""

    class Single(Block):
        pass

    class FluxLike(Holder):
        _no_split_modules = ("Block", "Single")

    model = FluxLike(transformer_blocks=blocks(2), single_transformer_blocks=blocks(3, Single))
    assert Counter(name.split(".")[0] for name in fqns(model)) == {
        "transformer_blocks": 2, "single_transformer_blocks": 3,
    }  # fmt: skip


def test_convolutional_image_model_is_vision() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1, self.conv2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.conv2(self.bn1(self.conv1(x)))

    model = nn.Module()
    model.stem = nn.Conv2d(3, 4, 7)
    model.layer1 = nn.Sequential(Residual(), Residual())
    model.layer2 = nn.Sequential(Residual(), Residual())
    assert [(layer.fqn, layer.group) for layer in find_layers(model)] == [
        ("layer1.0", "vision"), ("layer1.1", "vision"), ("layer2.0", "vision"), ("layer2.1", "vision"),
    ]  # fmt: skip


def test_timm_style_blocks() -> None:
    class VisionTransformer(Holder):
        pass

    assert {layer.group for layer in find_layers(VisionTransformer(blocks=nn.Sequential(*blocks(4))))} == {"vision"}


# ------------------------------------------------------------------------------------------------------------- wrappers


def test_blocks_behind_checkpoint_wrappers() -> None:
    model = Holder(layers=nn.ModuleList(CheckpointWrapper(Block()) for _ in range(2)))
    found = find_layers(model)
    assert [layer.fqn for layer in found] == ["layers.0", "layers.1"]
    assert all(isinstance(layer.module, CheckpointWrapper) for layer in found), (
        "what the parent calls is what is sharded"
    )


def test_compiled_model_keeps_its_names() -> None:
    model = torch.compile(Holder(layers=nn.ModuleList([torch.compile(Block()), torch.compile(Block())])))
    assert fqns(model) == ["layers.0", "layers.1"]
    assert [layer.module for layer in find_layers(model)] == list(model._orig_mod.layers)


def test_data_parallel_model_keeps_its_names() -> None:
    class DistributedDataParallel(nn.Module):  # what the class is known by; the real one needs a process group
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    assert fqns(DistributedDataParallel(Holder(layers=blocks(2)))) == ["layers.0", "layers.1"]


def test_some_layers_sharded_already() -> None:
    """FSDP2 changes a module's class; a list of which some are sharded is still one run."""
    model = Holder(layers=blocks(3))
    model.layers[0].__class__ = type("FSDPBlock", (FSDPModule, Block), {})
    assert fqns(model) == ["layers.0", "layers.1", "layers.2"]


# ------------------------------------------------------------------------------------------------ what the caller names


@pytest.mark.parametrize(
    "wanted",
    [["layers.0", "layers.2"], ["layers.2", "layers.0"], "layers.[02]", ["layers.0", "layers.0", "layers.2"]],
)
def test_named_layers_in_model_order_once(wanted: object) -> None:
    assert fqns(Holder(layers=blocks(3)), wanted) == ["layers.0", "layers.2"]


def test_a_list_stands_for_its_members() -> None:
    model = Holder(layers=blocks(2), others=blocks(2))
    assert fqns(model, "layers") == fqns(model, model.layers) == fqns(model, ["layers.*"]) == ["layers.0", "layers.1"]
    assert fqns(model, nn.ModuleList([model.others[1]])) == ["others.1"]


def test_names_of_a_wrapped_model() -> None:
    model = torch.compile(Holder(layers=nn.ModuleList([CheckpointWrapper(Block()), Block()])))
    for name in ("layers.0", "_orig_mod.layers.0", "_orig_mod.layers.0._checkpoint_wrapped_module"):
        assert find_layers(model, [name])[0].module is model._orig_mod.layers[0]
    inner = model._orig_mod.layers[0]._checkpoint_wrapped_module
    assert find_layers(model, [inner])[0].module is model._orig_mod.layers[0]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["layer.0"], r"'layer\.0'.*Did you mean 'layers\.0'"),
        (["nothing_like_it.*"], r"'nothing_like_it\.\*', which matches no module"),
        ([], "empty"),
        (["layers.0", "layers.0.mlp"], r"'layers\.0' and 'layers\.0\.mlp'"),
        (["**"], "must not overlap"),
    ],
)
def test_wrong_names_are_errors(wanted: list[str], message: str) -> None:
    with pytest.raises(LayersNotFoundError, match=message):
        find_layers(Holder(layers=blocks(2)), wanted)


def test_wrong_objects_are_errors() -> None:
    model = Holder(layers=blocks(2))
    with pytest.raises(LayersNotFoundError, match="Block object that is not part of this Holder"):
        find_layers(model, [Block()])
    with pytest.raises(LayersNotFoundError, match="the model itself"):
        find_layers(model, [model])
    with pytest.raises(TypeError, match="7, an int"):
        find_layers(model, [7])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="layers is 7"):
        find_layers(model, 7)  # type: ignore[arg-type]


def test_nothing_found_lists_the_candidates() -> None:
    """A lookup that finds nothing must not pass in silence."""
    model = Holder(fcs=nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(6)))
    with pytest.raises(LayersNotFoundError, match=r"(?s)in this Holder.*fcs: 6 x Linear.*layers=\['fcs\.\*'\]"):
        find_layers(model)
    assert len(find_layers(model, ["fcs.*"])) == 6, "the advice works"
    with pytest.raises(LayersNotFoundError, match=r"children are: 0 \(Linear\)|Candidates"):
        find_layers(nn.Sequential(nn.Linear(DIM, DIM)))


# --------------------------------------------------------------------------------------------------------------- scopes


def towers() -> tuple[Layer, ...]:
    model = Holder(
        vision_tower=Holder(layers=blocks(2)),
        audio_tower=Holder(layers=blocks(3)),
        language_model=Holder(layers=blocks(4)),
    )
    return find_layers(model)


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("all", {"vision": 2, "audio": 3, "language": 4}),
        ("language", {"language": 4}),
        ("Vision", {"vision": 2}),
        ("multimodal", {"vision": 2, "audio": 3}),
        (["vision", "language"], {"vision": 2, "language": 4}),
        (("audio",), {"audio": 3}),
    ],
)
def test_scopes(scope: object, expected: dict[str, int]) -> None:
    assert Counter(layer.group for layer in select_layers(towers(), scope)) == expected  # type: ignore[arg-type]


def test_scope_that_selects_nothing_says_what_there_is() -> None:
    found = find_layers(Holder(layers=blocks(2)))
    with pytest.raises(ValueError, match="'vision' selects no layer; this model has 2 language layers"):
        select_layers(found, "vision")


@pytest.mark.parametrize(
    ("scope", "error"), [("visoin", ValueError), ([], ValueError), (3, TypeError), ([3], TypeError)]
)
def test_wrong_scopes(scope: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="scope"):
        select_layers(towers(), scope)  # type: ignore[arg-type]


def test_unknown_scope_suggests_the_near_one() -> None:
    with pytest.raises(ValueError, match="Did you mean 'vision'"):
        select_layers(towers(), "visoin")


def test_frozen_layers_are_selected_and_adapters_train() -> None:
    found = towers()
    for layer in found:
        if layer.group != "language":
            layer.module.requires_grad_(False)
    audio = [layer for layer in found if layer.group == "audio"]
    audio[1].module.add_module("lora_A", nn.Linear(DIM, 2))
    assert select_layers(found) == found
    assert Counter(layer.group for layer in found if not is_frozen(layer.module)) == {"language": 4, "audio": 1}


def test_non_float_parameters_do_not_train() -> None:
    """A k-bit layer stores its weights as uint8 parameters without gradients."""
    layer = Block()
    layer.attn.weight = nn.Parameter(torch.empty(DIM, DIM, dtype=torch.uint8), requires_grad=False)
    assert not is_frozen(layer)
    assert is_frozen(layer.requires_grad_(False)) and not is_frozen(nn.Identity())


# ------------------------------------------------------------------------------------------------------ names and globs


def test_bare_names() -> None:
    assert bare_name("_orig_mod.a._checkpoint_wrapped_module.b") == "a.b"


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("a.*.c", "a.b.c", True),
        ("a.*", "a.b.c", False),
        ("a.**", "a.b.c", True),
        ("**.c", "a.b.c", True),
        ("a.?", "a.b", True),
        ("l.[0-2]", "l.3", False),
        ("l.[!0]", "l.3", True),
        ("a+b", "aab", False),
    ],
)
def test_globs(pattern: str, name: str, matches: bool) -> None:
    assert bool(glob_to_regex(pattern).fullmatch(name)) == matches


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """Random module trees with blocks in lists, dicts and sequences, nested and shared."""
    kind = draw(st.sampled_from(["holder", "list", "dict", "sequential", "shared"])) if depth else "blocks"
    if kind == "blocks":
        return blocks(draw(st.integers(1, 3)), draw(st.sampled_from([Block, OtherBlock, MoEBlock])))
    if kind == "shared":
        shared = draw(trees(depth - 1))
        return Holder(first=shared, second=shared)
    children = draw(st.lists(trees(depth - 1), min_size=1, max_size=3))
    if kind == "list":
        return nn.ModuleList(children)
    if kind == "dict":
        return nn.ModuleDict({str(index + 4): child for index, child in enumerate(children)})
    if kind == "sequential":
        return nn.Sequential(*[Block() for _ in range(draw(st.integers(2, 3)))])
    return Holder(**{f"child_{chr(97 + index)}": child for index, child in enumerate(children)})


@settings(max_examples=60, deadline=None)
@given(trees())
def test_found_layers_never_overlap_and_keep_their_names(tree: nn.Module) -> None:
    with torch.device("meta"):
        model = Holder(body=tree)
    found = find_layers(model)
    inside = Counter(id(part) for layer in found for part in layer.module.modules())
    assert max(inside.values()) == 1
    assert all(model.get_submodule(layer.fqn) is layer.module for layer in found)
    covered = {id(part) for layer in found for part in layer.module.modules()}
    assert all(id(part) in covered for part in model.modules() if isinstance(part, Block))


def test_a_parametrised_module_counts_once() -> None:
    cell = nn.RNNCell(4, 4)
    assert weighted_parts(cell) == 1
    for name in ("weight_ih", "weight_hh"):
        nn.utils.parametrizations.weight_norm(cell, name)
    assert weighted_parts(cell) == 1


# -------------------------------------------------------------------------------------- adapters, heads and lists of lists


class Adapter(nn.Module):
    """A linear with LoRA, as peft wraps it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base_layer = linear
        self.lora_A = nn.ModuleDict({"default": nn.Linear(DIM, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, DIM, bias=False)})
        self.lora_magnitude_vector = nn.ModuleDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def adapted(module: nn.Module) -> nn.Module:
    """`module`, with adapters around all of its linears."""
    for name, child in module.named_children():
        setattr(module, name, Adapter(child) if isinstance(child, nn.Linear) else adapted(child))
    return module


def test_adapted_linears_are_no_layers() -> None:
    merger = nn.ModuleDict({"norm": nn.LayerNorm(DIM), "mlp": nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))})
    heads = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
    model = Holder(
        merger=Holder(**merger), fc1=nn.Linear(DIM, DIM), fc2=nn.Linear(DIM, DIM), blocks=blocks(2), heads=heads
    )
    bare_names = fqns(model)
    assert fqns(adapted(model)) == bare_names == ["blocks.0", "blocks.1"]


def test_adapted_and_other_linears_of_a_list_are_no_layers() -> None:
    with pytest.raises(LayersNotFoundError, match="fcs: 2 x Linear"):
        find_layers(adapted(Holder(fcs=nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2)))))


def test_heads_by_name_beside_blocks_are_no_layers() -> None:
    heads = nn.ModuleDict({"sentiment": Block(), "topic": Block()})
    assert fqns(Holder(encoder=Holder(blocks=blocks(2)), heads=heads)) == ["encoder.blocks.0", "encoder.blocks.1"]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class BareFeedForward(FeedForward):
    """Without a norm or a mixer: x-transformers keeps the norms in a list beside it."""

    def __init__(self) -> None:
        super().__init__()
        del self.net[0]


def pairs(kind: type[nn.Module], count: int = 2) -> nn.ModuleList:
    return nn.ModuleList(nn.ModuleList([Block(), kind()]) for _ in range(count))


def test_members_of_inner_lists_are_layers() -> None:
    """As vit-pytorch writes them, alone and as two encoders; with norms in a list of their own, as x-transformers does."""
    names = ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    assert fqns(Holder(to_patch_embedding=FeedForward().net, layers=pairs(FeedForward))) == names
    encoders = Holder(encoders=nn.ModuleList(Holder(layers=pairs(FeedForward)) for _ in range(2)))
    for encoder in encoders.encoders:
        encoder.embed = nn.Identity()
    assert fqns(encoders) == [f"encoders.{at}.{name}" for at in range(2) for name in names]
    beside = [nn.ModuleList([nn.ModuleList([nn.LayerNorm(DIM)]), BareFeedForward(), nn.Identity()]) for _ in range(2)]
    assert fqns(Holder(layers=nn.ModuleList(beside))) == ["layers.0.1", "layers.1.1"]
    by_name = [nn.ModuleDict({"attention": Block(), "mlp": BareFeedForward()}) for _ in range(2)]
    assert fqns(Holder(layers=nn.ModuleList(by_name))) == [
        f"layers.{at}.{w}" for at in (0, 1) for w in ("attention", "mlp")
    ]


def test_the_advice_names_the_list_that_holds_most() -> None:
    wide = nn.ModuleList(nn.Linear(DIM, 4 * DIM) for _ in range(2))
    with pytest.raises(LayersNotFoundError, match=r"layers=\['inner\.fcs\.\*'\]"):
        find_layers(Holder(to_patch_embedding=nn.Sequential(nn.Linear(DIM, DIM)), inner=Holder(fcs=wide)))


class Patched(nn.Module):
    """Video patches, a table of classes and one of positions, and blocks: as video diffusion transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv3d(4, 8, (1, 2, 2), (1, 2, 2))
        self.class_table, self.positions = nn.Embedding(1001, 8), nn.Embedding(64, 8)
        self.blocks = blocks(3)

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.atom_table, self.nodes, self.layers = nn.Embedding(119, 8), nn.Linear(4, 8), blocks(3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(32, 8), blocks(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks(3)


class NamesIds(Bare):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def _configured() -> nn.Module:
    model = Bare()
    model.config = SimpleNamespace(vocab_size=32)
    return model


def _with_embeddings_of_its_own() -> nn.Module:
    model = Bare()
    model.inputs = nn.Module()
    model.inputs.ids = nn.Embedding(32, 8)
    return model


def _with_text_encoder() -> nn.Module:
    """What conditions a video model embeds words; its own blocks take none."""
    model = Patched()
    model.conditions = Plain()
    return model


@pytest.mark.parametrize(
    ("make", "groups"),
    [
        (Patched, {"vision": 3}),
        (Graph, {"other": 3}),
        (Plain, {"language": 3}),
        (lambda: nn.Sequential(nn.Embedding(32, 8), *blocks(3)), {"language": 3}),
        (NamesIds, {"language": 3}),
        (_configured, {"language": 3}),
        (_with_text_encoder, {"vision": 3, "language": 3}),
        (_with_embeddings_of_its_own, {"language": 3}),
        (Bare, {"other": 3}),
    ],
)
def test_language_takes_evidence_of_text(make: Callable[[], nn.Module], groups: dict[str, int]) -> None:
    assert Counter(layer.group for layer in find_layers(make())) == groups
