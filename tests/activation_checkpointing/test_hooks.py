"""Callers' hooks inside checkpointed layers: those that only look on are called once, the others as often as they must."""

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
from tests.checks import assert_bitwise, gradients_of
from tests.models.blocks import MODES, checkpoint_region, region, under

D = 8
SCALE = {"factor": 1.0}
ENDS: list[int] = []


class Block(nn.Module):
    """Reads a dict of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(D), nn.Linear(D, 16), nn.Linear(16, D), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)) * SCALE["factor"])))


Log = list[Any]

# Hooks that only look on


def _keeps_gradients(block: Any, log: Log) -> None:
    def keep(module: nn.Module, _: Any, out: Tensor) -> None:
        out.retain_grad()
        log.append(lambda: out.grad.norm().item())

    block.up.register_forward_hook(keep)


def _counts(block: Any, log: Log) -> None:
    block.up.register_forward_hook(lambda *_: log.append("after"), always_call=True)
    block.norm.register_forward_pre_hook(lambda m, args, kwargs: log.append(len(args)), with_kwargs=True)
    block.register_forward_pre_hook(lambda *_: log.append("before the layer"))
    block.register_forward_hook(lambda *_: log.append("after the layer"))


def _multiplies(block: Any, log: Log) -> None:
    """Statistics with a matmul, which policies save, and with operators whose inputs autograd saves."""
    grams: dict[nn.Module, Tensor] = {}

    def add(module: nn.Module, args: Any, out: Tensor) -> None:
        with torch.no_grad():
            grams[module] = grams.get(module, torch.zeros(())) + args[0].T @ args[0]
        log.append((grams[module].sum().item(), out.square().mean().sqrt().item()))

    block.up.register_forward_hook(add)
    block.down.register_forward_hook(add)


def _removes_itself(block: Any, log: Log) -> None:
    def hook(*_: Any) -> None:
        log.append("once")
        handle.remove()

    handle = block.up.register_forward_hook(hook)


def _on_all(block: Any, log: Log) -> None:
    def note(module: nn.Module, *_: Any) -> None:
        log.append(type(module).__name__)

    handles = [register_module_forward_hook(note), register_module_forward_pre_hook(note)]
    log.append(lambda: [handle.remove() for handle in handles])


def _on_the_module(block: Any, log: Log) -> None:
    """Writes into its module, so it is called again, and what it wrote is put back."""

    def note(module: Any, _: Any, out: Tensor) -> None:
        module.calls, module.out = getattr(module, "calls", 0) + 1, out

    block.up.register_forward_hook(note)
    log.append(lambda: (block.up.calls, block.up.out.sum().item()))


# Hooks that are a part of the computation


def _in_place(block: Any, log: Log) -> None:
    def double(_: nn.Module, args: Any, out: Tensor) -> None:
        out.mul_(2)

    block.up.register_forward_hook(double)
    block.norm.register_forward_hook(lambda *_: log.append("after"))


def _new_output(block: Any, log: Log) -> None:
    """As adapters of others do, with a hook on another module that only looks on."""
    block.up.register_forward_hook(lambda module, args, out: out * 2)
    block.norm.register_forward_hook(lambda *_: log.append("after"))


def _adds_a_loss(block: Any, log: Log) -> None:
    losses: list[Tensor] = []
    block.up.register_forward_hook(lambda module, args, out: losses.append(out.square().mean()))
    block.register_forward_hook(lambda module, args, out: out + losses[-1])


class Pair:
    """A pre-hook that returns nothing hands something to a hook that returns a new output."""

    def before(self, _: nn.Module, args: Any) -> None:
        self.x = args[0]

    def after(self, _: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out + self.x.mean()


def _share_an_object(block: Any, log: Log) -> None:
    pair = Pair()
    block.up.register_forward_pre_hook(pair.before)
    block.up.register_forward_hook(pair.after)


def _share_a_dict(block: Any, log: Log) -> None:
    shared: dict[str, Tensor] = {}
    block.up.register_forward_pre_hook(lambda module, args: shared.update(x=args[0]))
    block.up.register_forward_hook(lambda module, args, out: out + shared["x"].mean())


def _share_a_variable(block: Any, log: Log) -> None:
    last: Any = None

    def before(_: nn.Module, args: Any) -> None:
        nonlocal last
        last = args[0]

    block.up.register_forward_pre_hook(before)
    block.up.register_forward_hook(lambda module, args, out: out + last.mean())


def _sets_the_weight(block: Any, log: Log) -> None:
    """As pruning and the older weight norm do."""

    def set_weight(module: Any, args: Any) -> None:
        module.weight = module.v * 2 / module.v.norm()

    block.up.v = nn.Parameter(block.up.weight.detach().clone())
    del block.up.weight
    block.up.register_forward_pre_hook(set_weight)


def _buffer(block: Any, log: Log) -> None:
    block.up.register_buffer("scale", torch.ones(()))
    block.up.register_forward_pre_hook(lambda module, args: module.scale.add_(1) and None)
    block.up.register_forward_hook(lambda module, args, out: out * module.scale.item())


HOOKS = [
    _keeps_gradients, _counts, _multiplies, _removes_itself, _on_all, _on_the_module, _in_place, _new_output, _adds_a_loss,
    _share_an_object, _share_a_dict, _share_a_variable, _sets_the_weight, _buffer,
]  # fmt: skip


def _run(put: Callable[[Any, Log], None], ac: str, first: bool) -> tuple[Log, list[Tensor]]:
    """What hooks noted in three steps, of which the last has two passes, and all gradients."""
    torch.manual_seed(0)
    model, log, gradients = nn.Sequential(Block(), Block(), Block()), [], []
    x = torch.rand(2, D)
    for checkpoints in (not first, first):
        if checkpoints and ac != "original":
            parallelize(model, "single", ac, device="cpu")
        for block in model if not checkpoints else ():
            put(block, log)
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
@pytest.mark.parametrize("put", HOOKS, ids=lambda put: put.__name__)
def test_hooks_do_what_they_do_without_checkpointing(put: Callable[[Any, Log], None], ac: str, first: bool) -> None:
    (noted, gradients), (expected, expected_gradients) = _run(put, ac, first), _run(put, "original", first)
    assert_bitwise(gradients, expected_gradients)
    assert noted == expected


def _for_the_layer(block: Any, log: Log) -> None:
    """Sets what the layer's forward reads: in a dict of the file, and another value for each layer and pass."""
    block.norm.register_forward_pre_hook(lambda module, args: SCALE.update(factor=1.0 + args[0].detach().mean().item()))


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])  # "submodule" does not recompute what reads it
def test_a_hook_that_writes_where_only_the_layer_reads_is_named(ac: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCALE, "factor", 1.0)
    with pytest.raises(
        RegionError, match=r'(?s)`return x \+ self.drop\(self.down\(.*SCALE\["factor"\]\)\)\)` .*Usual causes: .*hooks'
    ):
        _run(_for_the_layer, ac, True)


@dataclass
class Note:
    """A hook that cannot be hashed."""

    calls: int = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_hooks_are_called_once_for_all_backwards_of_a_graph(ac: str) -> None:
    model, note = under(ac, lambda: nn.Sequential(Block(), Block())), Note()
    for block in model:
        block.up.register_forward_hook(note)
    loss = model(torch.ones(2, D)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    assert note.calls == 2
    with torch.no_grad():
        model(torch.ones(2, D))
    assert note.calls == 4


@pytest.mark.parametrize("policy", [FullPolicy(), nemo_like.SelectivePolicy()])
def test_hooks_in_a_region_within_a_region(policy: Any) -> None:
    block, note = Block(), Note()
    block.up.register_forward_hook(note)
    table, outer = dict(block.up._forward_hooks), nn.Sequential(block, nn.Tanh())
    block.forward = region(block.forward, policy)
    checkpoint_region(outer, torch.ones(2, D), policy=FullPolicy()).sum().backward()
    assert note.calls == 1 and dict(block.up._forward_hooks) == table


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
def test_code_can_ask_whether_it_is_recomputed_and_its_end_is_not(ac: Any) -> None:
    seen: list[bool] = []
    ENDS.clear()

    class Asking(Block):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(nemo_like.is_recomputing())
            y = super().forward(x)
            ENDS.append(1)  # autograd has saved all that it saves
            return y

    model = under(ac, lambda: nn.Sequential(Asking(), Asking()), layers=["*"])
    x = torch.ones(2, D, requires_grad=True)
    loss = model(x).square().mean()
    assert seen == [False, False] and not nemo_like.is_recomputing()
    loss.backward()
    assert seen == [False, False, True, True] and not nemo_like.is_recomputing()
    assert len(ENDS) == (4 if ac is REENTRANT else 2)
