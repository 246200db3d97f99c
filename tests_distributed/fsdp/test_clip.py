"""The norm of a sharded model's gradients is the norm of the whole model's."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from nemo_like.distributed.gradients import clip_grad_norm_
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.shard import shard_layers
from tests.checks import gradients_of, seeded, whole
from tests.models.tiny import Decoder, tokens
from tests_distributed.spawn import on_ranks

pytestmark = pytest.mark.compat

NORMS = (2.0, 1.0, 3.5, math.inf)


def _single() -> Decoder:
    model = seeded(Decoder, layers=2, width=6)  # 6 over 4 ranks: some shards are empty
    model(tokens()).backward()
    return model


@pytest.mark.few(2)
@pytest.mark.parametrize(("world_size", "replicas", "foreach"), [(2, 1, None), (4, 1, False), (4, 2, True)])
@on_ranks()
def test_sharded_equals_whole(rank: int, world_size: int, replicas: int, foreach: bool | None) -> None:
    for norm_type in NORMS:
        expected = _single()
        model = seeded(Decoder, layers=2, width=6)
        shard_layers(model, list(model.layers), build_mesh(dp_replicate=replicas))
        model(tokens()).backward()
        with torch.no_grad():
            model(tokens())  # an evaluation in between leaves the root gathered, and its parameters without gradients
        want = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.05, norm_type)
        norm = clip_grad_norm_(model, 0.05, norm_type, foreach=foreach)
        assert type(norm) is torch.Tensor and norm.shape == ()
        # Sums over shards, then over ranks: float32 in another order than on one device.
        torch.testing.assert_close(norm, want, rtol=1e-5, atol=0)
        torch.testing.assert_close(gradients_of(model), gradients_of(expected), rtol=1e-5, atol=1e-8)


@on_ranks(4)
def test_mixed_meshes(rank: int, world_size: int) -> None:
    """FSDP x TP beside FSDP alone, replicated, partial and plain: each gradient counts once."""
    mesh = build_mesh(tp=2)
    torch.manual_seed(0)
    whole_gradients = [torch.randn(8, 4) for _ in range(6)]
    params = []
    layouts = [
        (mesh, (Shard(0), Shard(1))),
        (mesh, (Replicate(), Shard(1))),
        (mesh["dp_shard"], (Shard(0),)),
        (mesh["tp"], (Replicate(),)),
        (mesh["tp"], (Partial(),)),
    ]
    for gradient, (where, placements) in zip(whole_gradients, layouts):
        partial = any(placement.is_partial() for placement in placements)
        param = nn.Parameter(
            distribute_tensor(torch.zeros(8, 4), where, [Replicate()] * where.ndim if partial else placements)
        )
        param.grad = (
            DTensor.from_local(gradient / where.size(), where, placements)
            if partial
            else distribute_tensor(gradient.clone(), where, placements)
        )
        params.append(param)
    plain = nn.Parameter(torch.zeros(8, 4))
    plain.grad = whole_gradients[5].clone()
    without = nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh["dp_shard"], (Shard(0),)))
    expected = torch.stack(whole_gradients).norm()
    torch.testing.assert_close(clip_grad_norm_([*params, plain, without], 1.0), expected)
    for param, gradient in zip([*params, plain], whole_gradients):
        torch.testing.assert_close(whole(param.grad), gradient / (expected + 1e-6))


@on_ranks(2, timeout=20)
def test_a_rank_without_the_gradient_still_takes_part(rank: int, world_size: int) -> None:
    mesh = build_mesh()
    param = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, (Shard(0),)))
    if rank == 0:
        param.grad = distribute_tensor(torch.ones(4), mesh, (Shard(0),), src_data_rank=None)
    assert clip_grad_norm_(param, 1.0).item() == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_tensors_are_as_in_torch(norm_type: float, dtype: torch.dtype) -> None:
    ours, theirs = _single().to(dtype), _single().to(dtype)
    found = clip_grad_norm_(ours.parameters(), 0.05, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05, norm_type)
    # The norm is kept in float32: its p-th power and root round once more than torch's own.
    torch.testing.assert_close(found.to(dtype), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients_of(ours), gradients_of(theirs), rtol=1e-6, atol=0)


def test_bfloat16_gradients_are_added_in_float32() -> None:
    param = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    param.grad = torch.full_like(param, 0.01)
    value = param.grad[0].item()
    assert clip_grad_norm_(param, 1e9).item() == pytest.approx(64 * value, rel=1e-6)
    assert param.grad[0].item() == value  # below the limit: unchanged


def test_edges() -> None:
    param = nn.Parameter(torch.zeros(2))
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_(param, 1.0).item() == 0.0
    param.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(param, math.inf).item() == 5.0
    assert param.grad.tolist() == [3.0, 4.0]
    clip_grad_norm_(param, 0.0)
    assert param.grad.tolist() == [0.0, 0.0]
    param.grad = torch.tensor([math.nan, 1.0])
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        clip_grad_norm_(param, 1.0, error_if_nonfinite=True)
    assert param.grad[1] == 1.0
    for bad in ({"max_norm": -1.0}, {"max_norm": math.nan}, {"max_norm": 1.0, "norm_type": 0.0}):
        with pytest.raises(ValueError, match="it must be >"):
            clip_grad_norm_(param, **bad)
