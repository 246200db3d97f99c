"""Failures of other offloaders, one test for each report."""

import contextlib
import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from nemo_like.activation_checkpointing.legacy import CheckpointWrapper
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, SelectivePolicy
from nemo_like.offload import HostPolicy, Offloader, apply_offloading, offload_activations
from nemo_like.offload.backends import Backend
from tests.checks import assert_bitwise
from tests.models.blocks import Layer, without_collector
from tests.offload.cases import Stack, config, gradients, stack_of


def _adapted() -> nn.Module:
    """LoRA's shape: a frozen matrix beside a small trained one."""
    return Layer(
        lambda layer, x: (layer.base(x) + layer.up(layer.down(x))).relu(),
        base=nn.Linear(32, 32, bias=False).requires_grad_(False),
        down=nn.Linear(32, 2, bias=False),
        up=nn.Linear(2, 32, bias=False),
    )


@pytest.mark.parametrize("known", [True, False], ids=["model known", "model unknown"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_30_weights_and_autocast_copies_of_them_never_move(kind: str, autocast: bool, known: bool) -> None:
    torch.manual_seed(0)
    blocks = [_adapted() if kind == "lora" else nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)]
    model = Stack([*blocks, nn.Linear(32, 32)])
    sources: list[torch.Tensor] = []

    class Watching(Backend):
        def copy(self, target: Any, source: Any, stream: Any, **regions: Any) -> None:
            sources.append(source.clone())
            super().copy(target, source, stream, **regions)

    x = torch.randn(4, 8, 32, requires_grad=True)
    with (
        offload_activations(config(), model=model if known else None, backend=Watching()) as offloader,
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
    ):
        loss = model(x * 1).float().sum()
    loss.backward()
    bytes_of_weights = [
        cast.contiguous().view(torch.uint8).flatten()
        for p in model.parameters()
        for cast in (p.detach(), p.detach().bfloat16())
        if p.dim() == 2
    ]
    assert len(sources) >= 4
    for source in sources:
        assert not any(w.shape == source.shape and torch.equal(w, source) for w in bytes_of_weights)
    reasons = set(offloader.stats.kept_count)
    assert any("parameter" in reason or "autocast" in reason for reason in reasons)
    assert ("autocast's copy of a weight" in reasons) == autocast


def test_30_detached_weights_and_buffers_of_a_known_model_never_move() -> None:
    model = Layer(
        lambda tied, x: (x @ tied.weight.detach().t()) * tied.table[:8],
        weight=nn.Parameter(torch.randn(16, 16)),
        table=nn.Buffer(torch.randn(16, 16)),
    )
    with offload_activations(config(), model=model, backend=Backend()) as offloader:
        model(torch.randn(8, 16, requires_grad=True) * 1).sum().backward()
    assert offloader.stats.moved_bytes == 0
    assert offloader.stats.kept_count == {"a parameter, or a view of one": 1, "a buffer of the model": 1}


def _step(offloader: Offloader, model: nn.Module, how: str) -> None:
    x = torch.randn(8, 16)
    if how == "no_grad":
        with torch.no_grad(), offloader:
            model(x)
        return
    with contextlib.suppress(KeyError), offloader:
        loss = model(x).sum()
        if how == "exception":
            raise KeyError
    if how == "retained":
        loss.backward(retain_graph=True)
    if how != "exception":
        loss.backward()


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["plain", "retained", "no_grad", "exception"])
def test_32_two_hundred_steps_leak_nothing(how: str) -> None:
    model = stack_of(lambda x, scale: (x * scale).exp(), count=3)
    offloader = offload_activations(config(max_inflight_bytes=1), backend=Backend())
    live = []
    with without_collector():  # the memory must go with the last reference
        for step in range(200):
            _step(offloader, model, how)
            if step in (2, 100, 199):
                stats = offloader.collect()
                tensors = sum(type(o) is torch.Tensor for o in gc.get_objects())
                live.append((stats.host_live_bytes, tensors))
    assert live[0] == live[1] == live[2]
    assert live[0][0] == 0


def test_34_offloading_around_checkpointing_leaves_it_on() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp().cos()

    x = torch.randn(8, requires_grad=True) * 1
    for region in (
        lambda x: checkpoint(block, x, use_reentrant=False),
        CheckpointWrapper(type("Block", (nn.Module,), {"forward": lambda self, x: block(x)})()),
    ):
        with offload_activations(config(), backend=Backend()) as offloader:
            region(x)
        assert offloader.stats.copies == 1  # the region's input; without checkpointing there are three more


def test_35_host_decisions_move_instead_of_being_recomputed() -> None:
    policy = SelectivePolicy(every_nth_matmul=None)
    decide = HostPolicy(policy).start()
    assert decide(torch.ops.aten.addmm.default, 0) is HOST and policy.start()(torch.ops.aten.addmm.default, 0) is SAVE
    assert decide(torch.ops.aten.sin.default, 0) is RECOMPUTE

    x = torch.randn(4, 16)
    plain = Stack(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Softmax(-1)) for _ in range(2))
    model = Stack([CheckpointWrapper(layer, policy=policy) for layer in copy.deepcopy(plain).layers])
    plain(x).sum().backward()
    offloader = apply_offloading(model, list(model.layers), config("saved"), backend=Backend())
    loss = model(x).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    products = backward.get_flop_counts()["Global"]
    assert products.keys() == {torch.ops.aten.mm} and products[torch.ops.aten.mm] == 3 * 2 * 4 * 16 * 16
    assert offloader.stats.copies == 2 and offloader.stats.reloads == 1  # x too, which is still alive
    assert_bitwise(gradients(model), gradients(plain))
