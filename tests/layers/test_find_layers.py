"""Which modules are a model's layers, in which group, and what a scope selects. Everything on the meta device."""

import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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
    """Norm, attention and MLP by name only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attn = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[empty-body]
        """Finding never calls anything."""


class OtherBlock(Block):
    """Another class in the same list: a state-space block between attention blocks."""


class MoEBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)) for _ in range(4))


class Made(nn.Module):
    """A model made of whatever children it is given."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[empty-body]
        """Not called."""


class Holder(Made):
    """One that embeds words."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__(embed=nn.Embedding(4, DIM), **children)


def blocks(count: int, kind: type[nn.Module] = Block) -> nn.ModuleList:
    return nn.ModuleList(kind() for _ in range(count))


def fqns(model: nn.Module, layers: object = None) -> list[str]:
    return [layer.fqn for layer in find_layers(model, layers)]  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def on_meta():
    with torch.device("meta"):
        yield


# ------------------------------------------------------------------------------------------------- plain PyTorch models


def numbered(*names: str) -> nn.Module:
    """A bare module with blocks under these names."""
    module = nn.Module()
    for name in names:
        module.add_module(name, Block())
    return module


def stages(*children: nn.Module) -> nn.ModuleList:
    """Children without an embedding of their own."""
    for child in children:
        child.embed = nn.Identity()
    return nn.ModuleList(children)


def listed_twice() -> nn.Module:
    layers = blocks(2)
    return Holder(decoder=Holder(layers=layers), layers=layers)


class Aliased(Holder):
    layers = property(lambda self: self.inner.layers)


class Single(Block):
    """Another block of a diffusion transformer."""


class FluxLike(Holder):
    """As diffusers writes them: two lists of two block classes."""

    _no_split_modules = ("Block", "Single")


def pairs(*kinds: Callable[[], nn.Module]) -> nn.ModuleList:
    """Two inner lists of these kinds."""
    return nn.ModuleList(nn.ModuleList(kind() for kind in kinds) for _ in range(2))


def mlp() -> nn.Module:
    """Without a norm or a mixer: x-transformers keeps the norms in a list beside it."""
    return Made(net=nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)))


def feed_forward() -> nn.Module:
    return Made(net=nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)))


def names(pattern: str, *counts: int) -> list[str]:
    """`pattern` with all numbers below these counts, in their order."""
    return [pattern.format(*places) for places in itertools.product(*map(range, counts))]


INNER = names("layers.{}.{}", 2, 2)
FOUND: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "list": (lambda: Holder(blocks=blocks(3), head=nn.Linear(DIM, 4)), names("blocks.{}", 3)),
    "dict from 0": (lambda: Holder(layers=nn.ModuleDict({"0": Block(), "1": Block()})), names("layers.{}", 2)),
    "dict of a pipeline stage": (
        lambda: Holder(layers=nn.ModuleDict({"4": Block(), "5": Block()})), ["layers.4", "layers.5"]
    ),
    "dict of words": (
        lambda: Holder(layers=nn.ModuleDict({"enc": Block(), "dec": Block()})), ["layers.enc", "layers.dec"]
    ),
    "numbered children": (lambda: Holder(layers=numbered("4", "5", "6")), ["layers.4", "layers.5", "layers.6"]),
    "one layer left": (lambda: Holder(layers=nn.ModuleDict({"7": Block()})), ["layers.7"]),
    "sequential between embedding and head": (
        lambda: nn.Sequential(nn.Embedding(4, DIM), Block(), Block(), nn.LayerNorm(DIM), nn.Linear(DIM, 4)), ["1", "2"]
    ),
    "numbered attributes": (lambda: Holder(block1=Block(), block2=Block()), ["block1", "block2"]),
    "nested lists": (
        lambda: Holder(stages=nn.ModuleList([blocks(2), blocks(3)])),
        [*names("stages.0.{}", 2), *names("stages.1.{}", 3)],
    ),
    "blocks of stages, not the stages": (
        lambda: Holder(stages=stages(Holder(blocks=blocks(4)), Holder(blocks=blocks(4)))), names("stages.{}.blocks.{}", 2, 4)
    ),
    "every kind of a hybrid": (
        lambda: Holder(layers=nn.ModuleList([Block(), OtherBlock(), Block(), MoEBlock()])), names("layers.{}", 4)
    ),
    "experts in their block": (lambda: Holder(layers=blocks(3, MoEBlock)), names("layers.{}", 3)),
    "a shared block once": (lambda: Holder(layers=nn.ModuleList([Block()] * 12)), ["layers.0"]),
    "a list under two names once": (listed_twice, names("decoder.layers.{}", 2)),
    "no alias": (lambda: Aliased(inner=Holder(layers=blocks(2))), names("inner.layers.{}", 2)),
    "torch's encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, 2, 8), 3, enable_nested_tensor=False),
        names("layers.{}", 3),
    ),
    "torch's transformer": (
        lambda: nn.Transformer(DIM, 2, 2, 2, 8), [*names("encoder.layers.{}", 2), *names("decoder.layers.{}", 2)]
    ),
    "a diffusion transformer": (
        lambda: FluxLike(transformer_blocks=blocks(2), single_transformer_blocks=blocks(3, Single)),
        [*names("transformer_blocks.{}", 2), *names("single_transformer_blocks.{}", 3)],
    ),
    "adapted linears are none": (lambda: adapted(around()), names("blocks.{}", 2)),
    "nor linears around": (lambda: around(), names("blocks.{}", 2)),
    "heads by name beside blocks": (
        lambda: Holder(
            encoder=Holder(blocks=blocks(2)), heads=nn.ModuleDict({"sentiment": Block(), "topic": Block()})
        ),
        names("encoder.blocks.{}", 2),
    ),
    "members of inner lists, as vit-pytorch writes them": (
        lambda: Holder(to_patch_embedding=feed_forward().net, layers=pairs(Block, feed_forward)), INNER
    ),
    "of two encoders": (
        lambda: Holder(encoders=stages(*(Holder(layers=pairs(Block, feed_forward)) for _ in range(2)))),
        names("encoders.{}.layers.{}.{}", 2, 2, 2),
    ),
    "norms in a list of their own, as x-transformers": (
        lambda: Holder(layers=pairs(lambda: nn.ModuleList([nn.LayerNorm(DIM)]), mlp, nn.Identity)),
        ["layers.0.1", "layers.1.1"],
    ),
    "members by name": (
        lambda: Holder(layers=nn.ModuleList(nn.ModuleDict({"attention": Block(), "mlp": mlp()}) for _ in range(2))),
        ["layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "expected"), FOUND.values(), ids=FOUND)
def test_layers_are_found(make: Callable[[], nn.Module], expected: list[str]) -> None:
    model = make()
    found = find_layers(model)
    assert [layer.fqn for layer in found] == expected
    assert all(layer.module is model.get_submodule(layer.fqn) for layer in found)


# ------------------------------------------------------------------------------------------------------------- wrappers


def test_blocks_behind_checkpoint_wrappers() -> None:
    found = find_layers(Holder(layers=nn.ModuleList(CheckpointWrapper(Block()) for _ in range(2))))
    assert [layer.fqn for layer in found] == ["layers.0", "layers.1"]
    assert all(isinstance(layer.module, CheckpointWrapper) for layer in found), (
        "what the parent calls is what is sharded"
    )


def test_compiled_model_keeps_its_names() -> None:
    model = torch.compile(Holder(layers=nn.ModuleList([torch.compile(Block()), torch.compile(Block())])))
    assert fqns(model) == ["layers.0", "layers.1"]
    assert [layer.module for layer in find_layers(model)] == list(model._orig_mod.layers)


def test_data_parallel_model_keeps_its_names() -> None:
    # What the class is known by; the real one needs a process group.
    wrapper = type("DistributedDataParallel", (nn.Module,), {})()
    wrapper.module = Holder(layers=blocks(2))
    assert fqns(wrapper) == ["layers.0", "layers.1"]


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
    ("wanted", "error", "message"),
    [
        (lambda model: ["layer.0"], LayersNotFoundError, r"'layer\.0'.*Did you mean 'layers\.0'"),
        (lambda model: ["nothing_like_it.*"], LayersNotFoundError, r"'nothing_like_it\.\*', which matches no module"),
        (lambda model: [], LayersNotFoundError, "empty"),
        (lambda model: ["layers.0", "layers.0.mlp"], LayersNotFoundError, r"'layers\.0' and 'layers\.0\.mlp'"),
        (lambda model: ["**"], LayersNotFoundError, "must not overlap"),
        (lambda model: [Block()], LayersNotFoundError, "Block object that is not part of this Holder"),
        (lambda model: [model], LayersNotFoundError, "the model itself"),
        (lambda model: [7], TypeError, "7, an int"),
        (lambda model: 7, TypeError, "layers is 7"),
    ],
)
def test_wrong_names_and_objects_are_errors(
    wanted: Callable[[nn.Module], Any], error: type[Exception], message: str
) -> None:
    model = Holder(layers=blocks(2))
    with pytest.raises(error, match=message):
        find_layers(model, wanted(model))


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


@pytest.mark.parametrize(
    ("scope", "error", "message"),
    [
        ("other", ValueError, "'other' selects no layer; this model has 2 vision layers, 3 audio layers"),
        ("visoin", ValueError, "scope.*Did you mean 'vision'"),
        ([], ValueError, "scope"),
        (3, TypeError, "scope"),
        ([3], TypeError, "scope"),
    ],
)
def test_wrong_scopes(scope: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        select_layers(towers(), scope)


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
    assert max(Counter(id(part) for layer in found for part in layer.module.modules()).values()) == 1
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


def adapter(linear: nn.Linear) -> nn.Module:
    """A linear with LoRA, as peft wraps it."""
    return Made(
        base_layer=linear,
        lora_A=nn.ModuleDict({"default": nn.Linear(DIM, 2, bias=False)}),
        lora_B=nn.ModuleDict({"default": nn.Linear(2, DIM, bias=False)}),
        lora_magnitude_vector=nn.ModuleDict(),
    )


def adapted(module: nn.Module) -> nn.Module:
    """`module`, with adapters around all of its linears."""
    for name, child in module.named_children():
        setattr(module, name, adapter(child) if isinstance(child, nn.Linear) else adapted(child))
    return module


def around() -> nn.Module:
    """Blocks among linears that are none."""
    merger = {"norm": nn.LayerNorm(DIM), "mlp": nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))}
    heads = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
    linears = {"fc1": nn.Linear(DIM, DIM), "fc2": nn.Linear(DIM, DIM)}
    return Holder(merger=Holder(**merger), **linears, blocks=blocks(2), heads=heads)


def test_adapted_and_other_linears_of_a_list_are_no_layers() -> None:
    with pytest.raises(LayersNotFoundError, match="fcs: 2 x Linear"):
        find_layers(adapted(Holder(fcs=nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2)))))


def test_the_advice_names_the_list_that_holds_most() -> None:
    wide = nn.ModuleList(nn.Linear(DIM, 4 * DIM) for _ in range(2))
    with pytest.raises(LayersNotFoundError, match=r"layers=\['inner\.fcs\.\*'\]"):
        find_layers(Holder(to_patch_embedding=nn.Sequential(nn.Linear(DIM, DIM)), inner=Holder(fcs=wide)))


class Patched(Made):
    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:  # type: ignore[empty-body]
        """As video diffusion transformers are called."""


def patched(**children: nn.Module) -> nn.Module:
    """Video patches, a table of classes and one of positions, and blocks."""
    tables = {"class_table": nn.Embedding(1001, 8), "positions": nn.Embedding(64, 8)}
    return Patched(patches=nn.Conv3d(4, 8, (1, 2, 2), (1, 2, 2)), **tables, blocks=blocks(3), **children)


class Graph(Made):
    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:  # type: ignore[empty-body]
        """As models of graphs are called."""


class NamesIds(Made):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[empty-body]
        """As models of text are called."""


def bare(**attributes: Any) -> nn.Module:
    """Blocks without an embedding, and these attributes."""
    model = nn.Module()
    model.layers = blocks(3)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def residual() -> nn.Module:
    """A block of an image model."""
    return Made(conv1=nn.Conv2d(4, 4, 3), bn1=nn.BatchNorm2d(4), conv2=nn.Conv2d(4, 4, 3))


def residual_net() -> nn.Module:
    model = nn.Module()
    model.stem, model.layer1 = nn.Conv2d(3, 4, 7), nn.Sequential(residual(), residual())
    model.layer2 = nn.Sequential(residual(), residual())
    return model


class VisionTransformer(Holder):
    """As timm names it."""


GROUPS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "video patches": (patched, {"vision": 3}),
    "a graph": (lambda: Graph(atom_table=nn.Embedding(119, 8), nodes=nn.Linear(4, 8), layers=blocks(3)), {"other": 3}),
    "an embedding": (lambda: Holder(layers=blocks(3)), {"language": 3}),
    "an embedding in a sequence": (lambda: nn.Sequential(nn.Embedding(32, 8), *blocks(3)), {"language": 3}),
    "ids by name": (lambda: NamesIds(layers=blocks(3)), {"language": 3}),
    "a vocabulary in the config": (lambda: bare(config=SimpleNamespace(vocab_size=32)), {"language": 3}),
    "a text encoder that conditions": (
        lambda: patched(conditions=Holder(layers=blocks(3))), {"vision": 3, "language": 3}
    ),
    "an embedding inside": (lambda: bare(inputs=Made(ids=nn.Embedding(32, 8))), {"language": 3}),
    "nothing": (bare, {"other": 3}),
    "two towers and a list of heads": (
        lambda: Holder(
            image_encoder=Holder(blocks=blocks(2)), text_decoder=Holder(blocks=blocks(3)),
            heads=nn.ModuleList(nn.Linear(DIM, 2) for _ in range(3)),
        ),
        {"vision": 2, "language": 3},
    ),
    "convolutions": (residual_net, {"vision": 4}),
    "timm's name": (lambda: VisionTransformer(blocks=nn.Sequential(*blocks(4))), {"vision": 4}),
}  # fmt: skip


@pytest.mark.parametrize(("make", "groups"), GROUPS.values(), ids=GROUPS)
def test_the_group_of_layers_and_language_takes_evidence_of_text(
    make: Callable[[], nn.Module], groups: dict[str, int]
) -> None:
    model = make()
    assert Counter(layer.group for layer in find_layers(model)) == groups
    assert {group: len(modules) for group, modules in layer_groups(model).items()} == groups
