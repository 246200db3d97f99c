"""Six decoders x modes x strategies x two dtypes: loss and every gradient are those of ``ac="none"``, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from nemo_like import parallelize
from tests.models.decoders import NAMES, batch, build, loss_of
from tests_distributed.spawn import run_ranks

MODES = ("none", "full", "selective", "submodule")


def train_step(name: str, strategy: str, ac: str, dtype: str, ids: torch.Tensor, **more):
    """Loss and the local gradients by bare name of one step, and the parameter names."""
    model = parallelize(build(name), strategy=strategy, ac=ac, precision=None if dtype == "fp32" else dtype, **more)
    torch.manual_seed(7)
    loss = loss_of(model, ids)
    loss.backward()
    gradients = {
        key.removeprefix("module."): (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad)
        for key, p in model.named_parameters()
    }
    return loss.detach(), gradients


def _compare(rank: int, world_size: int, name: str, strategy: str, dtype: str, dp_replicate: int) -> list[str]:
    """What differs from ``ac="none"``, mode by mode; an empty list is the pass."""
    ids = batch(2, seed=rank)
    names = [key for key, _ in build(name).named_parameters()]
    expected_loss, expected = train_step(name, strategy, "none", dtype, ids, dp_replicate=dp_replicate)
    wrong = []
    for ac in MODES[1:]:
        loss, gradients = train_step(name, strategy, ac, dtype, ids, dp_replicate=dp_replicate)
        if list(gradients) != names:
            wrong.append(f"{ac}: names {set(gradients) ^ set(names)}")
        if not torch.equal(loss, expected_loss):
            wrong.append(f"{ac}: loss {loss} != {expected_loss}")
        wrong += [f"{ac}: {key}" for key, g in gradients.items() if g is None or not torch.equal(g, expected[key])]
    assert all(torch.isfinite(g).all() for g in expected.values())
    return wrong


@pytest.mark.few(7)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_single(name: str, dtype: str) -> None:
    assert _compare(0, 1, name, "single", dtype, 1) == []


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("strategy", "ranks", "dp_replicate"), [("ddp", 2, 1), ("fsdp2", 2, 1), ("fsdp2", 4, 2)])
def test_ranks(name: str, strategy: str, ranks: int, dp_replicate: int, dtype: str) -> None:
    assert run_ranks(ranks, _compare, name, strategy, dtype, dp_replicate, timeout=180) == [[]] * ranks


def _fsdp2_gradients(rank: int, world_size: int, name: str, ac: str):
    model = parallelize(build(name).eval(), strategy="fsdp2", ac=ac)
    loss = loss_of(model, batch(4)[2 * rank : 2 * rank + 2])
    loss.backward()
    return loss.item(), {key: p.grad.full_tensor() for key, p in model.named_parameters()}


@pytest.mark.few(3)
@pytest.mark.parametrize("ac", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_two_halves_make_the_whole(name: str, ac: str) -> None:
    # eval(): dropout masks belong to a rank's own half, so only without them is the whole batch the same computation.
    reference = build(name).eval()
    loss = loss_of(reference, batch(4))
    loss.backward()
    (loss0, gradients), (loss1, _) = run_ranks(2, _fsdp2_gradients, name, ac, timeout=120)
    assert (loss0 + loss1) / 2 == pytest.approx(loss.item(), rel=1e-5)
    for key, p in reference.named_parameters():
        # Relative to the gradient's norm: sums over two halves round differently from one sum over the whole.
        assert (gradients[key] - p.grad).norm() <= 1e-5 * p.grad.norm() + 1e-9, key
