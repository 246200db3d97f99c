"""Optimizer state of parameters that are frozen, or have had no gradient yet. The judge is the uninterrupted run."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from nemo_like import parallelize
from nemo_like.distributed import get_model_state, get_optimizer_state, set_model_state, set_optimizer_state
from nemo_like.distributed.ranks import Ranks
from nemo_like.distributed.weights.checkpoints import CheckpointError, CheckpointStore
from tests.checks import backward, seeded, update
from tests_distributed.spawn import on_ranks

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Parts(nn.Module):
    """Three layers, and a head that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.extra = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, use: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + (self.extra(x).square().mean() if use else 0)


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "groups": _groups,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, dampening=0.5),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
}


def _build(seed: int, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = parallelize(seeded(Parts, seed=seed), strategy="fsdp2", ac="none", device="cpu")
    return model, OPTIMIZERS[optimizer](model)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, use: bool = True) -> float:
    loss = backward(model(torch.randn(4, 8, generator=torch.Generator().manual_seed(batch)), use))
    update(optimizer)
    return loss.item()


def _freeze(model: nn.Module, name: str, frozen: bool) -> None:
    for each, parameter in model.named_parameters():
        if name in each:
            parameter.requires_grad_(not frozen)


def _resumed_while_frozen(optimizer: str, name: str, full: bool) -> tuple[list[float], list[float]]:
    model, own = _build(0, optimizer)
    for batch in range(3):
        _step(model, own, batch)
    _freeze(model, name, True)
    _step(model, own, 3)
    state = copy.deepcopy((get_model_state(model), get_optimizer_state(model, own, full=full)))
    _freeze(model, name, False)
    uninterrupted = [_step(model, own, batch) for batch in range(4, 7)]
    model, own = _build(1, optimizer)
    _freeze(model, name, True)
    set_model_state(model, state[0])
    set_optimizer_state(model, own, state[1], full=full)
    _freeze(model, name, False)
    return uninterrupted, [_step(model, own, batch) for batch in range(4, 7)]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", ["layers.0.", "layers.1.0.weight"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moments_of_parameters_that_are_frozen_while_loading_are_kept(optimizer: str, name: str, full: bool) -> None:
    uninterrupted, resumed = _resumed_while_frozen(optimizer, name, full)
    assert resumed == uninterrupted


@on_ranks(2)
def test_moments_of_frozen_parameters_are_kept_on_ranks(rank: int, world_size: int) -> None:
    for optimizer in ("adamw", "sgd"):
        for full in (False, True):
            uninterrupted, resumed = _resumed_while_frozen(optimizer, "layers.0.", full)
            assert resumed == uninterrupted
            _check_copies(optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_whole_state_is_that_of_its_moment(optimizer: str) -> None:
    _check_copies(optimizer)


def _check_copies(optimizer: str) -> None:
    model, own = _build(0, optimizer)
    _step(model, own, 0)
    kept = get_optimizer_state(model, own, full=True).get("state", {}), get_model_state(model, full=True)
    then = copy.deepcopy(kept)
    _step(model, own, 1)
    torch.testing.assert_close(kept, then, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["store", "dcp"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_parameter_without_a_gradient_yet_is_resumed(optimizer: str, how: str, tmp_path: Path) -> None:
    model, own = _build(0, optimizer)
    for batch in range(3):
        _step(model, own, batch, use=False)
    had = len(own.state)
    _save(how, tmp_path, {"model": get_model_state(model), "optimizer": get_optimizer_state(model, own)})
    assert len(own.state) == had
    uninterrupted = [_step(model, own, batch) for batch in range(3, 6)]
    model, own = _build(1, optimizer)
    state = {"model": get_model_state(model), "optimizer": get_optimizer_state(model, own)}
    _load(how, tmp_path, state)
    set_model_state(model, state["model"])
    set_optimizer_state(model, own, state["optimizer"])
    assert len(own.state) == had
    assert [_step(model, own, batch) for batch in range(3, 6)] == uninterrupted


def test_a_sound_checkpoint_of_before_without_these_moments_is_resumed(tmp_path: Path) -> None:
    model, own = _build(0, "adamw")
    _step(model, own, 0, use=False)
    state: dict[str, Any] = {"model": get_model_state(model), "optimizer": get_optimizer_state(model, own)}
    for name in ("extra.weight", "extra.bias"):
        del state["optimizer"]["state"][name]
    _save("store", tmp_path, state)
    uninterrupted = [_step(model, own, batch) for batch in range(1, 4)]
    model, own = _build(1, "adamw")
    state = {"model": get_model_state(model), "optimizer": get_optimizer_state(model, own)}
    _load("store", tmp_path, state)
    set_model_state(model, state["model"])
    set_optimizer_state(model, own, state["optimizer"])
    assert [_step(model, own, batch) for batch in range(1, 4)] == uninterrupted
    assert not list(tmp_path.glob(".damaged*"))


def test_a_checkpoint_without_a_weight_is_still_refused(tmp_path: Path) -> None:
    model, _ = _build(0, "adamw")
    state = {"model": get_model_state(model)}
    del state["model"]["extra.bias"]
    _save("store", tmp_path, state)
    with pytest.raises(RuntimeError, match=r"extra\.bias"):
        _load("store", tmp_path, {"model": get_model_state(model)})


def test_a_store_refuses_to_drop_moments_of_frozen_parameters(tmp_path: Path) -> None:
    model, own = _build(0, "adamw")
    _step(model, own, 0)
    _save("store", tmp_path, {"model": get_model_state(model), "optimizer": get_optimizer_state(model, own)})
    model, own = _build(1, "adamw")
    _freeze(model, "layers.0.", True)
    state = {"model": get_model_state(model), "optimizer": get_optimizer_state(model, own)}
    before = copy.deepcopy(state["model"])
    with pytest.raises(CheckpointError, match=r"moments of layers\.0\.0\.bias, which is frozen now \(2 parameters"):
        _load("store", tmp_path, state)
    assert all(map(torch.equal, state["model"].values(), before.values()))
    assert not list(tmp_path.glob(".damaged*"))
    trained = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])  # not to train the others is meant
    _load("store", tmp_path, {"model": get_model_state(model), "optimizer": get_optimizer_state(model, trained)})


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model, _ = _build(0, "adamw")
    with pytest.raises(ValueError, match=r"8 parameter\(s\) that are not in the model"):
        get_optimizer_state(model, OPTIMIZERS["adamw"](Parts()))


def _save(how: str, folder: Path, state: dict[str, Any]) -> None:
    if how == "dcp":
        dcp.save(state, checkpoint_id=folder)
    else:
        store = CheckpointStore(folder, Ranks.of_process(torch.device("cpu")))
        store.save(3, state, about={})
        store.wait()


def _load(how: str, folder: Path, state: dict[str, Any]) -> None:
    if how == "dcp":
        dcp.load(state, checkpoint_id=folder)
    else:
        assert CheckpointStore(folder, Ranks.of_process(torch.device("cpu"))).load(state, check=lambda about: None) == 3
