"""Callers' hooks inside checkpointed layers: those that only look on are called once, the others as often as they must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import nemo_like
from nemo_like import CheckpointConfig, parallelize
from nemo_like.activation_checkpointing.engine import RegionError
from nemo_like.activation_checkpointing.policy import FullPolicy
from tests.checks import assert_bitwise, gradients_of, same
from tests.models.blocks import checkpoint_region, under

D = 8
MODES = ["full", "selective", "submodule", "sequential"]
SCALE = {"factor": 1.0}
ENDS: list[int] = []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(D), nn.Linear(D, 16), nn.Linear(16, D), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Scaled(Block):
    """Reads a dict of this file."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)) * SCALE["factor"]))


class Logging(Block):
    """Fills a list of this file when autograd has saved all that it saves."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        ENDS.append(1)
        return y


Log = list[Any]


def _caches(model: nn.Sequential, log: Log) -> None:
    cache: dict[int, Tensor] = {}

    def keep(module: nn.Module, _: Any, out: Tensor) -> None:
        out.retain_grad()
        cache[len(cache)] = out

    for block in model:
        block.up.register_forward_hook(keep)
    log.append(lambda: [out.grad.norm().item() for out in cache.values()])


def _counts(model: nn.Sequential, log: Log) -> None:
    for block in model:
        block.up.register_forward_hook(lambda *_: log.append("after"), always_call=True)
        block.norm.register_forward_pre_hook(lambda m, args, kwargs: log.append(len(args)), with_kwargs=True)


def _on_layers(model: nn.Sequential, log: Log) -> None:
    for block in model:
        block.register_forward_pre_hook(lambda *_: log.append("before"))
        block.register_forward_hook(lambda *_: log.append("after"))


def _multiplies(model: nn.Sequential, log: Log) -> None:
    """Statistics with a matmul, which policies save, and with operators whose inputs autograd saves."""
    grams: dict[nn.Module, Tensor] = {}

    def add(module: nn.Module, args: Any, out: Tensor) -> None:
        with torch.no_grad():
            grams[module] = grams.get(module, torch.zeros(())) + args[0].T @ args[0]
        log.append((grams[module].sum().item(), out.square().mean().sqrt().item()))

    for block in model:
        block.up.register_forward_hook(add)
        block.down.register_forward_hook(add)


def _removes_itself(model: nn.Sequential, log: Log) -> None:
    for block in model:
        handles: list[Any] = []

        def hook(*_: Any, handles: list[Any] = handles) -> None:
            log.append("once")
            handles[0].remove()

        handles.append(block.up.register_forward_hook(hook))


def _on_all(model: nn.Sequential, log: Log) -> None:
    def note(module: nn.Module, *_: Any) -> None:
        log.append(type(module).__name__)

    handles = [register_module_forward_hook(note), register_module_forward_pre_hook(note)]
    log.append(lambda: [handle.remove() for handle in handles])


def _on_the_module(model: nn.Sequential, log: Log) -> None:
    """Writes into its module, so it is called again, and what it wrote is put back."""

    def note(module: Any, _: Any, out: Tensor) -> None:
        module.calls, module.out = getattr(module, "calls", 0) + 1, out

    for block in model:
        block.up.register_forward_hook(note)
    log.append(lambda: [(block.up.calls, block.up.out.sum().item()) for block in model])


ONLOOKERS = (_caches, _counts, _on_layers, _multiplies, _removes_itself, _on_all, _on_the_module)


def _in_place(model: nn.Sequential, log: Log) -> None:
    def double(_: nn.Module, args: Any, out: Tensor) -> None:
        out.mul_(2)

    for block in model:
        block.up.register_forward_hook(double)
        block.norm.register_forward_hook(lambda *_: log.append("after"))


def _new_output(model: nn.Sequential, log: Log) -> None:
    """As adapters of others do, with a hook on another module that only looks on."""
    for block in model:
        block.up.register_forward_hook(lambda module, args, out: out * 2)
        block.norm.register_forward_hook(lambda *_: log.append("after"))


def _two_that_share(share: str) -> Callable[[nn.Sequential, Log], None]:
    """A pre-hook that returns nothing hands something to a hook that returns a new output."""

    class Pair:
        def before(self, _: nn.Module, args: Any) -> None:
            self.x = args[0]

        def after(self, _: nn.Module, args: Any, out: Tensor) -> Tensor:
            return out + self.x.mean()

    def put(model: nn.Sequential, log: Log) -> None:
        given: dict[str, Tensor] = {}
        last: Any = None
        pair = Pair()

        def before(_: nn.Module, args: Any) -> None:
            nonlocal last
            if share == "dict":
                given["x"] = args[0]
            else:
                last = args[0]

        def after(_: nn.Module, args: Any, out: Tensor) -> Tensor:
            return out + (given["x"] if share == "dict" else last).mean()

        for block in model:
            block.up.register_forward_pre_hook(pair.before if share == "object" else before)
            block.up.register_forward_hook(pair.after if share == "object" else after)

    return put


def _for_the_layer(model: nn.Sequential, log: Log) -> None:
    """Sets what the layer's forward reads: in a dict of the file, and another value for each layer and pass."""

    def scale(_: nn.Module, args: Any) -> None:
        SCALE["factor"] = 1.0 + args[0].detach().mean().item()

    for block in model:
        block.norm.register_forward_pre_hook(scale)


def _sets_the_weight(model: nn.Sequential, log: Log) -> None:
    """As pruning and the older weight norm do."""

    def set_weight(module: Any, args: Any) -> None:
        module.weight = module.v * 2 / module.v.norm()

    for block in model:
        block.up.v = nn.Parameter(block.up.weight.detach().clone())
        del block.up.weight
        block.up.register_forward_pre_hook(set_weight)


def _buffer(model: nn.Sequential, log: Log) -> None:
    def raise_scale(module: Any, args: Any) -> None:
        module.scale.add_(1)

    for block in model:
        block.up.register_buffer("scale", torch.ones(()))
        block.up.register_forward_pre_hook(raise_scale)
        block.up.register_forward_hook(lambda module, args, out: out * module.scale.item())


PARTS = {
    "in place": _in_place,
    "new output": _new_output,
    "share a dict": _two_that_share("dict"),
    "share a variable": _two_that_share("variable"),
    "share an object": _two_that_share("object"),
    "sets the weight": _sets_the_weight,
    "buffer": _buffer,
}


def _run(
    put: Callable[[nn.Sequential, Log], None], ac: str, first: bool, kind: type[Block]
) -> tuple[Log, list[Tensor]]:
    """What hooks noted in three steps, of which the last has two passes, and all gradients."""
    torch.manual_seed(0)
    SCALE["factor"] = 1.0
    model, log, gradients = nn.Sequential(kind(), kind(), kind()), [], []
    x = torch.rand(2, D)
    if first:
        put(model, log)
    if ac != "original":
        parallelize(model, "single", ac, device="cpu")
    if not first:
        put(model, log)
    for step in range(3):
        model.zero_grad()
        loss = model(x).square().mean()
        if step == 2:
            loss = loss + model(2 * x).square().mean()
        loss.backward()
        gradients += gradients_of(model).values()
    return [item() if callable(item) else item for item in log], gradients


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("ac", MODES)
@pytest.mark.parametrize("put", ONLOOKERS, ids=lambda put: put.__name__)
def test_hooks_that_look_on_see_what_they_see_without_checkpointing(put: Any, ac: str, first: bool) -> None:
    start = 1 if put is _on_all else 0  # the model's own name
    noted, gradients = _run(put, ac, first, Block)
    expected, expected_gradients = _run(put, "original", first, Block)
    assert_bitwise(gradients, expected_gradients)
    assert noted[start:] == expected[start:]


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("ac", MODES)
@pytest.mark.parametrize("name", PARTS)
def test_hooks_that_are_part_of_the_computation_are_called_again(name: str, ac: str, first: bool) -> None:
    assert same(_run(PARTS[name], ac, first, Scaled), _run(PARTS[name], "original", first, Scaled))


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])  # "submodule" does not recompute what reads it
def test_a_hook_that_writes_where_only_the_layer_reads_is_named(ac: str) -> None:
    with pytest.raises(
        RegionError, match=r'(?s)`return x \+ self.down\(.*SCALE\["factor"\]\)\)` .*Usual causes: .*hooks'
    ):
        _run(_for_the_layer, ac, True, Scaled)


@pytest.mark.parametrize("ac", MODES)
def test_a_hook_whose_loss_is_used_is_called_again(ac: str) -> None:
    def gradients(ac: str) -> list[Tensor]:
        model, losses = under(ac, lambda: nn.Sequential(Block(), Block())), []
        for block in model:
            block.up.register_forward_hook(lambda module, args, out: losses.append(out.square().mean()))
        for _ in range(2):
            losses.clear()
            model.zero_grad()
            out = model(torch.ones(2, D)).square().mean()
            (out + sum(losses)).backward()
        return list(gradients_of(model).values())

    assert_bitwise(gradients(ac), gradients("none"))


@pytest.mark.parametrize("ac", MODES)
def test_a_hook_that_cannot_be_hashed_is_called_once(ac: str) -> None:
    @dataclass
    class Note:
        calls: int = 0

        def __call__(self, *_: Any) -> None:
            self.calls += 1

    model, note = under(ac, lambda: nn.Sequential(Block(), Block())), Note()
    model[1].up.register_forward_hook(note)
    model(torch.ones(2, D)).square().mean().backward()
    assert note.calls == 1


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_hooks_are_called_once_for_all_backwards_of_a_graph(ac: str) -> None:
    model, calls = parallelize(nn.Sequential(Block(), Block()), "single", ac, device="cpu"), []
    for block in model:
        block.up.register_forward_hook(lambda *_: calls.append(1))
    loss = model(torch.ones(2, D)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(calls) == 2
    with torch.no_grad():
        model(torch.ones(2, D))
    assert len(calls) == 4


@pytest.mark.parametrize("policy", [FullPolicy(), nemo_like.SelectivePolicy()])
def test_hooks_in_a_region_within_a_region(policy: Any) -> None:
    block, calls = Block(), []
    block.up.register_forward_hook(lambda *_: calls.append(1))
    table = dict(block.up._forward_hooks)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_region(self.block, x, policy=policy).sin()

    checkpoint_region(Outer(), torch.ones(2, D), policy=FullPolicy()).sum().backward()
    assert calls == [1] and dict(block.up._forward_hooks) == table


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_a_list_that_layers_fill_at_their_end_gets_nothing_in_backward(ac: str) -> None:
    ENDS.clear()
    model = parallelize(nn.Sequential(Logging(), Logging(), Logging(), Logging()), "single", ac, device="cpu")
    for _ in range(2):
        model(torch.ones(2, D)).square().mean().backward()
    assert len(ENDS) == 8


@pytest.mark.parametrize("ac", MODES)
def test_a_hook_that_changes_results_and_is_removed_before_backward_is_called_again(ac: str) -> None:
    def gradients(mode: str) -> list[Tensor]:
        model = under(mode, lambda: nn.Sequential(Block(), Block()))
        handles = [
            model[1].up.register_forward_hook(lambda module, args, kwargs, out: out * 2, with_kwargs=True),
            model[1].up.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        ]
        loss = model(torch.ones(2, D)).square().mean()
        for handle in handles:
            handle.remove()
        loss.backward()
        assert not model[1].up._forward_hooks and not model[1].up._forward_hooks_with_kwargs
        return list(gradients_of(model).values())

    assert_bitwise(gradients(ac), gradients("none"))


REENTRANT = CheckpointConfig(True, "full", use_reentrant=True, profile_before_apply=False)


@pytest.mark.parametrize("ac", ["full", "selective", "sequential", pytest.param(REENTRANT, id="reentrant")])
def test_code_can_ask_whether_it_is_recomputed(ac: Any) -> None:
    seen: list[bool] = []

    class Asking(Block):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(nemo_like.is_recomputing())
            return super().forward(x)

    model = under(ac, lambda: nn.Sequential(Asking(), Asking()), layers=["*"])
    x = torch.ones(2, D, requires_grad=True)
    loss = model(x).square().mean()
    assert seen == [False, False] and not nemo_like.is_recomputing()
    loss.backward()
    assert seen == [False, False, True, True] and not nemo_like.is_recomputing()
