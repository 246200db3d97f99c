"""Lightning's Fabric and Trainer with `ModelParallelStrategy` on two ranks: what their loops train without us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from nemo_like.distributed import clip_grad_norm_
from tests.checks import update, whole
from tests.models import decoders
from tests_distributed.spawn import on_ranks, run_ranks

pytest.importorskip("lightning", reason="the extra 'hosts' is not installed")

STEPS = 4


def _by_hand(model: nn.Module, device_mesh: Any) -> nn.Module:
    """What people write without us."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=device_mesh["data_parallel"])
    return fully_shard(model, mesh=device_mesh["data_parallel"])


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def _ids(step: int, row: int) -> Tensor:
    return decoders.batch(2, 16, seed=2 * step + row)


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p).detach().clone() for name, p in model.named_parameters()}


def _fabric(rank: int, world_size: int, folder: str, settings: dict[str, Any] | None, tp: int = 1) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from nemo_like.integrations.lightning import parallelize_fn

    how = _by_hand if settings is None else parallelize_fn(**settings)
    strategy = ModelParallelStrategy(how, data_parallel_size=world_size // tp, tensor_parallel_size=tp)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(decoders.build("qwen3"))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    losses = []

    def step(number: int) -> None:
        for micro in range(2):  # accumulation
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = _loss(model, _ids(2 * number + micro, 0 if tp > 1 else rank))
                fabric.backward(loss / 2)
        # torch's own clipping, which Fabric calls, takes gradients of one mesh alone.
        norm = clip_grad_norm_(model.module, 0.5) if tp > 1 else fabric.clip_gradients(model, optimizer, max_norm=0.5)
        update(optimizer)
        losses.extend([loss.item(), whole(norm).item()])

    for number in range(2):
        step(number)
    state = {"model": model, "optimizer": optimizer}
    fabric.save(f"{folder}/at2", state)
    for number in range(2, STEPS):
        step(number)
    after = _whole(model)
    if tp == 1:
        fabric.load(f"{folder}/at2", state)
        again = losses[4:]
        del losses[4:]
        for number in range(2, STEPS):
            step(number)
        assert losses[4:] == again
        for name, value in _whole(model).items():
            assert torch.equal(value, after[name]), name
    return losses, after, sorted({name for name, module in model.module.named_modules() if isinstance(module, FSDPModule)})


def _same(found: Any, expected: Any) -> None:
    for (losses, weights, units), (their_losses, their_weights, their_units) in zip(found, expected, strict=True):
        assert losses == their_losses
        assert set(their_units) <= set(units)
        assert weights.keys() == their_weights.keys()
        for name, value in their_weights.items():
            assert torch.equal(weights[name], value), name


def test_fabric(tmp_path: Path) -> None:
    expected = run_ranks(2, _fabric, str(tmp_path / "bare"), None, init_group=False)
    assert len(expected[0][0]) == 2 * STEPS and any("layers.0" in name for name in expected[0][2])
    for settings in (dict(ac="selective"), dict(ac="full", offload="boundary")):
        _same(run_ranks(2, _fabric, str(tmp_path / str(settings["ac"])), settings, init_group=False), expected)
    chunked = run_ranks(2, _fabric, str(tmp_path / "loss"), dict(ac="full", loss="chunked"), init_group=False)
    for (losses, *_), (theirs, *_) in zip(chunked, expected, strict=True):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(theirs), rtol=1e-4, atol=0)


def test_fabric_splits_tensors_by_the_same_line(tmp_path: Path) -> None:
    ((alone, *_),) = run_ranks(1, _fabric, str(tmp_path / "alone"), None, init_group=False)
    for losses, *_ in run_ranks(2, _fabric, str(tmp_path / "tp"), dict(ac="selective"), 2, init_group=False):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-4, atol=0)


def _trainer(rank: int, world_size: int, folder: str, settings: dict[str, Any] | None) -> Any:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    from nemo_like.integrations.lightning import parallelize_fn

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = decoders.build("qwen3"), {}

        def configure_model(self) -> None:
            if settings is not None:
                self.model = parallelize_fn(**settings)(self.model, self.device_mesh)
            elif not isinstance(self.model, FSDPModule):
                self.model = _by_hand(self.model, self.device_mesh)

        def training_step(self, number: Tensor, index: int) -> Tensor:
            loss = _loss(self.model, _ids(int(number), rank))
            self.losses[index] = loss.item()
            return loss

        def validation_step(self, number: Tensor, index: int) -> None:
            self.losses[f"validation {index}"] = _loss(self.model, _ids(100 + int(number), rank)).item()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)

    def fit(name: str, resume: str | None = None) -> Module:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=world_size, strategy=ModelParallelStrategy(world_size, 1),
            max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.5, logger=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False, val_check_interval=4, num_sanity_val_steps=1,
            callbacks=[ModelCheckpoint(f"{folder}/{name}", every_n_train_steps=2, save_top_k=-1, filename="{step}")],
        )  # fmt: skip
        module = Module()
        steps = torch.utils.data.DataLoader(torch.arange(8), batch_size=1)
        checks = torch.utils.data.DataLoader(torch.arange(2), batch_size=1)
        trainer.fit(module, steps, checks, ckpt_path=resume)
        trainer.validate(module, checks, verbose=False)
        return module

    first = fit("first")
    resumed = fit("resumed", f"{folder}/first/step=2.ckpt")  # its loader begins again, at the third step
    return [first.losses, resumed.losses, _whole(first.model)], _whole(resumed.model), []


def test_the_trainer(tmp_path: Path) -> None:
    expected = run_ranks(2, _trainer, str(tmp_path / "bare"), None, init_group=False, timeout=120)
    first, resumed, _ = expected[0][0]
    assert len(first) == 8 + 2 and len(resumed) == 4 + 2
    found = run_ranks(2, _trainer, str(tmp_path / "ours"), dict(ac="selective"), init_group=False, timeout=120)
    for rank in range(2):
        assert found[rank][0][:2] == expected[rank][0][:2]
        for ours, theirs in zip((found[rank][0][2], found[rank][1]), (expected[rank][0][2], expected[rank][1])):
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@on_ranks(2)
def test_what_is_lightnings_is_refused(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from nemo_like.integrations.lightning import parallelize_fn

    for name in ("mesh", "strategy"):
        with pytest.raises(TypeError, match=f"{name}= is set by Lightning"):
            parallelize_fn(**{name: None})
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match=r"axes \('dp',\); Lightning's has data_parallel, tensor_parallel"):
        parallelize_fn()(decoders.build("plain"), mesh)
