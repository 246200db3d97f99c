"""Every way of walking a wrapped model's tree names what the bare model's names.

transformers' Trainer decides about weight decay by a walk over `named_children` and `_parameters`, torchao swaps layers
over `named_children`, PEFT looks modules up by name, PyTorch's optimizer state dicts over all of these.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nemo_like import apply_activation_checkpointing
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper
from nemo_like.layers import find_layers
from nemo_like.offload.layer_offload import apply_offloading
from tests.checks import assert_bitwise, step
from tests.models.blocks import Stack
from tests.models.decoders import build

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
