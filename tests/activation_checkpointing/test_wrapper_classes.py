"""Checkpointed layers in others' hands: walks of the tree, classes exchanged, checkpointing switched on after ours.

transformers' Trainer decides about weight decay by a walk over `named_children` and `_parameters`, torchao swaps layers
over `named_children`, PEFT looks modules up by name, PyTorch's optimizer state dicts over all of these.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as TorchCheckpointWrapper
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing as torch_checkpointing,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nemo_like import apply_activation_checkpointing, parallelize
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper, unwrap_checkpoint_wrapper
from nemo_like.layers import find_layers
from nemo_like.offload.offloader import apply_offloading
from nemo_like.options import OffloadConfig
from tests.checks import assert_bitwise, step
from tests.models.blocks import Stack
from tests.models.decoders import batch, build, loss_of

MODES = ["full", "selective", "submodule", "sequential", "offload", "offload+selective"]
FAMILIES = ["plain", "scaled", "gpt2", "mixtral"]


class ScaledBlock(nn.Module):
    """A block with a parameter and buffers of its own, beside its children's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("table", torch.ones(8), persistent=False)
        self.norm = nn.LayerNorm(8)
        self.attn = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.attn(self.norm(x))) * self.scale * self.table


def _model(family: str) -> nn.Module:
    if family in ("scaled", "listed"):
        torch.manual_seed(0)
        return Stack((ScaledBlock if family == "scaled" else _listed)() for _ in range(3)).train()
    return build(family)


def _listed() -> nn.Module:
    """A layer that is a plain sequence: the container that a caller indexes is what is wrapped."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def _wrapped(family: str, mode: str) -> nn.Module:
    model = _model(family)
    for part in mode.split("+")[::-1]:
        if part == "offload":
            apply_offloading(model, [layer.module for layer in find_layers(model)], "all")
        else:
            apply_activation_checkpointing(model, part)
    return model


def _names_without(model: nn.Module, forbidden: tuple[type, ...]) -> list[str]:
    """Names of the parameters outside modules of these classes, by recursion as trainers do it."""
    names = [
        f"{child_name}.{name}"
        for child_name, child in model.named_children()
        if not isinstance(child, forbidden)
        for name in _names_without(child, forbidden)
    ]
    return names + list(model._parameters)


def _bottom_up(model: nn.Module) -> list[str]:
    stack, names = [("", model)], []
    while stack:
        prefix, module = stack.pop()
        names.append(prefix)
        stack += [(f"{prefix}.{name}".strip("."), child) for name, child in module.named_children()]
    return names[::-1]


def _states(model: nn.Module) -> list[str]:
    """Parameters and buffers, each module asked for its own."""
    names = []

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.")
        names.extend(f"{prefix}{name}" for name, _ in module.named_parameters(recurse=False))
        names.extend(f"{prefix}{name}" for name, _ in module.named_buffers(recurse=False))

    visit(model, "")
    return names


WALKS: dict[str, Callable[[nn.Module], Any]] = {
    "named_parameters": lambda m: [(n, tuple(p.shape)) for n, p in m.named_parameters()],
    "named_parameters, duplicates": lambda m: [n for n, _ in m.named_parameters(remove_duplicate=False)],
    "named_buffers": lambda m: [(n, tuple(b.shape)) for n, b in m.named_buffers()],
    "named_buffers, duplicates": lambda m: [n for n, _ in m.named_buffers(remove_duplicate=False)],
    "named_modules": lambda m: list(dict.fromkeys(n for n, _ in m.named_modules())),
    "named_modules, duplicates": lambda m: [n for n, _ in m.named_modules(remove_duplicate=False)],
    "named_modules, prefixed": lambda m: list(dict.fromkeys(n for n, _ in m.named_modules(prefix="a.b"))),
    "state_dict": lambda m: [(n, tuple(t.shape)) for n, t in m.state_dict().items()],
    "by recursion": lambda m: _names_without(m, ()),
    "outside of norms": lambda m: _names_without(m, (nn.LayerNorm,)),
    "outside of linears": lambda m: _names_without(m, (nn.Linear,)),
    "bottom up": _bottom_up,
    "each module's own": _states,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_every_walk_gives_the_bare_models_names(family: str, mode: str) -> None:
    bare, model = _model(family), _wrapped(family, mode)
    for title, walk in WALKS.items():
        assert walk(model) == walk(bare), title
    layer, of_bare = (find_layers(each)[0].module for each in (model, bare))
    assert [name for name, _ in layer.named_parameters()] == [name for name, _ in of_bare.named_parameters()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_every_name_leads_to_its_own(family: str, mode: str) -> None:
    bare, model = _model(family), _wrapped(family, mode)
    for name, parameter in bare.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
    for name, buffer in bare.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
    for name, module in bare.named_modules():
        found = model.get_submodule(name)
        found = getattr(found, "_checkpoint_wrapped_module", found)
        assert type(getattr(found, "_checkpoint_wrapped_module", found)) is type(module)


@pytest.mark.parametrize("mode", MODES)
def test_children_replaced_by_a_walk_are_what_runs(mode: str) -> None:
    class Doubled(nn.Linear):
        pass

    def swap(module: nn.Module) -> nn.Module:
        for name, child in list(module.named_children()):
            new = swap(child)
            if new is not child:
                setattr(module, name, new)
        return Doubled(module.in_features, module.out_features) if type(module) is nn.Linear else module

    model = _wrapped("scaled", mode)
    swap(model)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 12 and all(type(linear) is Doubled for linear in linears)
    model(torch.randn(4, 8)).sum().backward()
    assert all(linear.weight.grad is not None for linear in linears)


@pytest.mark.parametrize("mode", MODES)
def test_what_reaches_all_modules_still_does_once(mode: str) -> None:
    bare, model = _model("scaled"), _wrapped("scaled", mode)
    visited: list[nn.Module] = []
    model.apply(visited.append)
    assert {id(module) for module in model.modules()} == {id(module) for module in visited}
    assert len(visited) == len({id(module) for module in visited})
    for kind in (ScaledBlock, nn.Linear, nn.Sequential, nn.LayerNorm):
        wanted = [name for name, module in bare.named_modules() if isinstance(module, kind)]
        assert [name for name, module in model.named_modules() if isinstance(module, kind)] == wanted
        assert sum(isinstance(module, kind) for module in visited) == len(wanted)
    moved: list[torch.Tensor] = []
    model._apply(lambda tensor: (moved.append(tensor), tensor.double())[1])
    assert len(moved) == len(list(bare.parameters())) + len(list(bare.buffers()))
    assert all(p.dtype is torch.float64 for p in [*model.parameters(), *model.get_submodule("layers.0").buffers()])
    assert model.eval() is model and not any(module.training for module in model.modules())
    model.load_state_dict(bare.double().state_dict(), strict=True)
    assert_bitwise(list(model.parameters()), list(bare.parameters()))


@pytest.mark.parametrize("mode", MODES)
def test_a_loaded_state_dict_says_what_is_missing_in_the_bare_models_words(mode: str) -> None:
    bare, model = _model("scaled"), _wrapped("scaled", mode)
    state = bare.state_dict()
    state["layers.1.other"] = state.pop("layers.1.scale")
    state["layers.1.norm.other"] = state.pop("layers.1.norm.weight")
    told, expected = (each.load_state_dict(state, strict=False) for each in (model, bare))
    assert [sorted(names) for names in told] == [sorted(names) for names in expected]


def _again(module: nn.Module) -> list[Any]:
    """A copy, and what is loaded from a file."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return [copy.deepcopy(module), torch.load(file, weights_only=False)]


@pytest.mark.parametrize("assign", [False, True])
def test_a_copy_a_pickle_and_assignment_keep_one_set_of_weights(assign: bool) -> None:
    model = CheckpointWrapper(nn.LayerNorm(4))
    for twin in _again(model):
        twin.load_state_dict({"weight": torch.full((4,), 3.0), "bias": torch.zeros(4)}, assign=assign)
        assert issubclass(type(twin), CheckpointWrapper) and torch.equal(twin.weight, torch.full((4,), 3.0))
        assert [id(p) for p in twin.parameters()] == [id(p) for p in twin._checkpoint_wrapped_module.parameters()]
    assert torch.equal(model.weight, torch.ones(4))


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(4), ScaledBlock])
def test_a_wrapped_layer_is_taken_for_its_class_and_for_a_wrapper(make: Callable[[], nn.Module]) -> None:
    kind, wrapped = type(make()), CheckpointWrapper(make())
    assert isinstance(wrapped, kind) and isinstance(wrapped, CheckpointWrapper)
    assert issubclass(type(wrapped), CheckpointWrapper) and kind.__name__ in repr(wrapped)


@pytest.mark.parametrize("mode", MODES)
def test_accelerate_finds_each_layer_once_by_its_class(mode: str) -> None:
    """accelerate's FSDP2 shards the modules of a class on a walk over `named_children`."""
    fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils", reason="needs accelerate")
    model = _wrapped("llama", mode)
    found = fsdp_utils.get_module_children_bottom_up(model, return_fqns=True)
    names = [name for name, module in found if isinstance(module, LlamaDecoderLayer)]
    assert names == [f"model.layers.{index}" for index in range(3)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_hidden_states_are_recorded_at_every_layer(family: str, mode: str) -> None:
    """transformers records them at the modules of a class, on a walk over `named_children`."""
    ids = torch.arange(12).reshape(2, 6) % 16
    expected = _model(family)(ids, use_cache=False, output_hidden_states=True).hidden_states
    wrapped = _wrapped(family, mode)
    hidden = wrapped(ids, output_hidden_states=True).hidden_states
    assert len(hidden) == 4
    assert_bitwise(hidden, expected)
    hidden[1].square().sum().backward()
    assert wrapped.get_input_embeddings().weight.grad.abs().sum() > 0


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


def _change(sequence: Any) -> list[Any]:
    """What a caller may do with an `nn.Sequential`, and what it answers."""
    torch.manual_seed(1)
    answers = [len(sequence), bool(sequence), [type(module) for module in sequence]]
    answers += [[type(module) for module in reversed([*sequence])], sequence[0] in sequence, len(sequence + sequence)]
    sequence[0] = Scaled(8, 8)
    sequence[-1] = Scaled(8, 8)
    del sequence[1]
    sequence.append(nn.Sigmoid())
    sequence.insert(1, nn.ReLU())
    sequence.extend([nn.Linear(8, 8)])
    sequence += nn.Sequential(nn.Tanh())
    sequence.add_module("last", Scaled(8, 8))
    sequence.further = Scaled(8, 8)
    del sequence.last
    return [*answers, len(sequence), [type(module) for module in sequence]]


@pytest.mark.parametrize(
    ("family", "mode"), [("scaled", "submodule"), ("listed", "full"), ("listed", "offload"), ("listed", "offload+full")]
)
def test_a_wrapped_sequence_is_changed_as_a_bare_one_is(family: str, mode: str) -> None:
    name = "layers.1.attn" if family == "scaled" else "layers.1"
    bare, model = _model(family).double(), _wrapped(family, mode).double()
    before = model.get_submodule(name)
    assert _change(model.get_submodule(name)) == _change(bare.get_submodule(name))
    assert model.get_submodule(name) is before
    model, bare = model.double(), bare.double()
    assert list(model.state_dict()) == list(bare.state_dict())
    assert WALKS["named_parameters"](model) == WALKS["named_parameters"](bare)
    x = torch.randn(5, 8, dtype=torch.float64)
    assert_bitwise(step(model, x), step(bare, x))


def test_a_wrapped_sequence_is_copied_and_saved_and_only_it_is_a_collection() -> None:
    wrapped = CheckpointWrapper(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    for again in _again(wrapped):
        assert type(again) is type(wrapped) and isinstance(again, CheckpointWrapper) and len(again) == 2
        again[0] = nn.Identity()
        assert list(again.state_dict()) == [] and len(list(wrapped.parameters())) == 2
    norm = CheckpointWrapper(nn.LayerNorm(4))
    assert bool(norm) and not isinstance(norm, Collection) and not hasattr(norm, "__len__")


D = 8
CLASS_MODES = ["none", "full", "selective", "submodule", "sequential"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + 2 * self.mlp(self.norm(x))


class Other(nn.Module):
    """Not a subclass: it uses the same attributes."""

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mlp(self.norm(x))


class Linear2(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def _made_for(block: nn.Module) -> None:
    """As `torch.nn.utils.parametrize` and others do: a class that is made of the one that the layer reports."""
    own = block.__class__
    block.__class__ = type("Patched", (own,), {"forward": lambda self, x: own.forward(self, x) * 2})


SWAPS = {
    "layer": lambda block: setattr(block, "__class__", Twice),
    "not a subclass": lambda block: setattr(block, "__class__", Other),
    "made of the class": _made_for,
    "twice": lambda block: (_made_for(block), setattr(block, "__class__", Twice)),
    "inner": lambda block: setattr(block.mlp, "__class__", Linear2),
    "forward": lambda block: setattr(block, "forward", Twice.forward.__get__(block)),
}


def _results(swap: str, ac: str, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    if ac != "original":
        parallelize(model, "single", ac, device="cpu", **options)
    for block in model:
        SWAPS[swap](block)
    out = model(torch.ones(2, D))
    out.square().mean().backward()
    return [out, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("ac", CLASS_MODES)
@pytest.mark.parametrize("swap", SWAPS)
def test_a_class_that_comes_after_checkpointing_runs(swap: str, ac: str) -> None:
    assert_bitwise(_results(swap, ac), _results(swap, "original"))


@pytest.mark.parametrize("swap", SWAPS)
def test_it_runs_inside_of_offloading_too(swap: str) -> None:
    offloaded = _results(swap, "full", offload=OffloadConfig("boundary", min_bytes=0))
    assert_bitwise(offloaded, _results(swap, "original"))


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_a_search_by_the_name_of_the_class_finds_the_layers(ac: str) -> None:
    model = parallelize(nn.Sequential(Block(), Block()), "single", ac, device="cpu")
    kinds = {type(block) for block in model}
    assert len(kinds) == 1, "Dynamo looks at classes"
    (kind,) = kinds
    assert (kind.__name__, kind.__qualname__) == ("Block", "Block")
    for block in model:
        assert isinstance(block, Block) and isinstance(block, TorchCheckpointWrapper)
    assert [name for name, m in model.named_modules() if type(m).__name__ == "Block"] == ["0", "1"]
    model[0].__class__ = Twice
    assert type(model[0]).__name__ == "Twice" and isinstance(model[0], Twice | CheckpointWrapper)
    assert type(model[1]) is kind


def test_copies_and_pickles_keep_the_class() -> None:
    wrapped: Any = CheckpointWrapper(nn.Sequential(Block(), Block()))
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert type(other) is type(wrapped) and len(other) == 2
        assert torch.equal(other(torch.ones(2, D)), wrapped(torch.ones(2, D)))
    assert type(unwrap_checkpoint_wrapper(wrapped)) is nn.Sequential


def _enable(model: Any) -> None:
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_switched_on_after_ours_is_refused_at_that_call(ac: str) -> None:
    model = apply_activation_checkpointing(build("llama"), ac)
    with pytest.raises(ValueError, match=r"layers\.0\.gradient_checkpointing is True.*recomputed twice"):
        _enable(model)
    with pytest.raises(ValueError, match="recomputed twice"):
        loss_of(model, batch())  # the flags that were set on the way are found


@pytest.mark.parametrize("copied", [False, True])
def test_around_sub_modules_it_is_refused_at_the_next_forward(copied: bool) -> None:
    model = apply_activation_checkpointing(build("llama"), "submodule")
    loss_of(model, batch()).backward()
    if copied:
        model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    _enable(model)
    with torch.no_grad():
        loss_of(model, batch())
    with pytest.raises(ValueError, match=r"gradient_checkpointing is True.*gradient_checkpointing_disable"):
        loss_of(model, batch())
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    loss_of(model, batch()).backward()


def test_as_timm_switches_it_on() -> None:
    model = build("plain")
    model.grad_checkpointing = False
    apply_activation_checkpointing(model, "full")
    loss_of(model, batch())
    model.grad_checkpointing = True
    with pytest.raises(ValueError, match=r"grad_checkpointing is True.*set_grad_checkpointing\(False\)"):
        loss_of(model, batch())


@pytest.mark.parametrize("ac", ["full", "submodule"])
def test_pytorchs_wrapper_around_ours_is_refused_at_the_first_forward(ac: str) -> None:
    model = apply_activation_checkpointing(build("llama"), ac)
    layers = set(model.model.layers)
    torch_checkpointing(model, check_fn=lambda module: module in layers)
    with pytest.raises(ValueError, match=r"checkpoint_wrapper was put around .*layers\.0.*two wrappers nest"):
        loss_of(model, batch())


def test_pytorchs_wrapper_inside_ours_is_refused_at_the_first_forward() -> None:
    model = apply_activation_checkpointing(build("llama"), "full")
    torch_checkpointing(model, check_fn=lambda module: type(module).__name__ == "LlamaMLP")
    with pytest.raises(ValueError, match="two wrappers nest"):
        loss_of(model, batch())
