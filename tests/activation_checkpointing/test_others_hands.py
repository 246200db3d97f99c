"""Checkpointed layers in others' hands: walks, copies, classes and forwards exchanged, checkpointing switched on after ours.

The judge is the same model without checkpointing.
"""

import copy
import functools
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing as torch_checkpointing,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nemo_like import apply_activation_checkpointing, is_checkpointed, parallelize
from nemo_like._util.forwards import Place, _chain
from nemo_like.activation_checkpointing.checkpointed import Checkpointed
from nemo_like.activation_checkpointing.policy import DecisionTable
from nemo_like.options import OffloadConfig
from tests.checks import assert_bitwise, gradients_of, step
from tests.models.blocks import under, without_collector
from tests.models.decoders import batch, build, loss_of

D = 8
OFFLOADED = {"offload": OffloadConfig("all", min_bytes=0)}
MODES: dict[str, dict[str, Any]] = {
    "full": {"ac": "full"},
    "selective": {"ac": "selective"},
    "submodule": {"ac": "submodule"},
    "sequential": {"ac": "sequential"},
    "offload": {"ac": "none", **OFFLOADED},
    "offload+selective": {"ac": "selective", **OFFLOADED},
    "bf16": {"ac": "full", "precision": "bf16"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(D), nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + 2 * self.mlp(self.norm(x))


def _blocks() -> nn.Sequential:
    return under("none", lambda: nn.Sequential(Block(), Block(), Block()))


def _ready(model: nn.Module, mode: str) -> Any:
    return parallelize(model, "single", device="cpu", **MODES[mode])


def _saved(model: nn.Module) -> Any:
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["plain", "gpt2", "mixtral"])
def test_every_walk_meets_the_original_model(family: str, mode: str) -> None:
    original = build(family)
    model = _ready(build(family), mode)
    for walk in (nn.Module.named_modules, nn.Module.named_children):
        expected = [(name, type(module)) for name, module in walk(original)]
        assert [(name, type(module)) for name, module in walk(model)] == expected
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in original.named_parameters()]
    assert list(model.state_dict()) == list(original.state_dict())
    assert model.load_state_dict(original.state_dict()) == ([], []) and str(model) == str(original)


@pytest.mark.parametrize("again", [copy.deepcopy, _saved, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("mode", MODES)
def test_copies_train_as_the_original_and_share_nothing(mode: str, again: Callable[[nn.Module], nn.Module]) -> None:
    model = _ready(build("plain"), mode)
    for _ in range(2):  # before and after a step
        twin = again(model)
        assert_bitwise(step(twin, batch(2)), step(model, batch(2)))
        chains = [_chain(vars(m).get("forward")) for m in twin.modules()]
        assert all(forward.module is m for m, each in zip(twin.modules(), chains) for forward in each)
        assert not {id(m) for m in twin.modules()} & {id(m) for m in model.modules()}
        twin.zero_grad(), model.zero_grad()


@pytest.mark.parametrize("mode", MODES)
def test_a_model_is_freed_without_the_collector(mode: str) -> None:
    model = _ready(_blocks(), mode)
    model(torch.ones(2, D)).sum().backward()
    weight = weakref.ref(model[0].mlp[0].weight)
    with without_collector():
        del model
        assert weight() is None


def test_objects_nest_in_one_order_and_print() -> None:
    model = _ready(_blocks(), "offload+selective")
    forward = model[0].forward
    assert repr(forward) == "Block (offloaded, selective)"
    assert [each.place for each in _chain(forward)] == [Place.OFFLOADING, Place.REGION]
    assert repr(Checkpointed(model[0], DecisionTable({}))) == "Block (planned)"
    compiled = parallelize(_blocks(), "single", "full", compile="aot_eager", precision="bf16", device="cpu")
    assert repr(compiled[0].forward) == "Block (full, compiled)" and repr(compiled.forward) == "Sequential (autocast)"


def test_accelerate_and_transformers_find_layers_by_their_class() -> None:
    fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils", reason="needs accelerate")
    original, model = build("llama"), _ready(build("llama"), "selective")
    walk = fsdp_utils.get_module_children_bottom_up(model, return_fqns=True)
    names = [name for name, module in walk if isinstance(module, LlamaDecoderLayer)]
    assert names == [f"model.layers.{index}" for index in range(3)]
    torch.manual_seed(1)
    expected = original(batch(2), use_cache=False, output_hidden_states=True).hidden_states
    torch.manual_seed(1)
    hidden = model(batch(2), output_hidden_states=True).hidden_states
    assert_bitwise(hidden, expected)
    hidden[1].square().sum().backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


def _around(block: nn.Module) -> None:
    own = block.forward
    block.forward = functools.wraps(own)(lambda *args: own(*args) * 2)


def _adapted(block: Any) -> None:
    """As adapter libraries put a module around a linear."""
    block.mlp[0] = nn.Sequential(block.mlp[0], nn.Tanh())


SWAPS: dict[str, Callable[[Any], Any]] = {
    "class": lambda block: setattr(block, "__class__", Twice),
    "class of a child": lambda block: setattr(block.norm, "__class__", nn.Identity),
    "forward": lambda block: setattr(block, "forward", Twice.forward.__get__(block)),
    "forward around": _around,
    "child": lambda block: setattr(block, "mlp", nn.Linear(D, D, bias=False, dtype=torch.float32)),
    "adapter": _adapted,
    "weight": lambda block: setattr(block.norm, "weight", nn.Parameter(torch.full((D,), 2.0))),
}


@pytest.mark.parametrize("mode", ["full", "selective", "submodule", "sequential", "offload+selective"])
@pytest.mark.parametrize("swap", SWAPS)
def test_changes_after_checkpointing_are_seen_as_in_a_plain_model(swap: str, mode: str) -> None:
    def results(model: nn.Sequential) -> list[Any]:
        torch.manual_seed(1)
        for block in model:
            SWAPS[swap](block)
        out = model(torch.ones(2, D))
        out.square().mean().backward()
        return [out, *gradients_of(model).values()]

    model = _ready(_blocks(), mode)
    assert_bitwise(results(model), results(_blocks()))
    assert all(is_checkpointed(each) for each in model) or mode == "submodule" or swap == "forward around"


@pytest.mark.parametrize("ac", ["full", "selective", "submodule", "sequential"])
@pytest.mark.parametrize("copied", [False, True])
def test_checkpointing_switched_on_after_ours_is_refused_at_the_next_forward(ac: str, copied: bool) -> None:
    model: Any = apply_activation_checkpointing(build("llama"), ac)
    loss_of(model, batch()).backward()
    model = pickle.loads(pickle.dumps(copy.deepcopy(model))) if copied else model
    model.gradient_checkpointing_enable()
    with torch.no_grad():
        loss_of(model, batch())
    with pytest.raises(ValueError, match=r"gradient_checkpointing is True.*gradient_checkpointing_disable"):
        loss_of(model, batch())
    model.gradient_checkpointing_disable()
    loss_of(model, batch()).backward()


def test_as_timm_switches_it_on() -> None:
    model = build("plain")
    model.grad_checkpointing = False
    apply_activation_checkpointing(model, "full")
    loss_of(model, batch())
    model.grad_checkpointing = True
    with pytest.raises(ValueError, match=r"grad_checkpointing is True.*set_grad_checkpointing\(False\)"):
        loss_of(model, batch())


NESTED = [("full", "LlamaDecoderLayer"), ("submodule", "LlamaDecoderLayer"), ("full", "LlamaMLP")]


@pytest.mark.parametrize(("ac", "name"), NESTED)
def test_pytorchs_wrapper_around_or_inside_ours_is_refused_at_the_first_forward(ac: str, name: str) -> None:
    model = apply_activation_checkpointing(build("llama"), ac)
    torch_checkpointing(model, check_fn=lambda module: type(module).__name__ == name)
    with pytest.raises(ValueError, match=r"checkpoint_wrapper was put around .*layers\.0.*two recomputations nest"):
        loss_of(model, batch())
