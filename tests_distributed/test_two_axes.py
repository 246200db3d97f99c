"""FSDP2 over tensor parallelism: the step of one rank, and each helper is right on parameters that are cut up twice."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nemo_like.distributed.gradients import clip_grad_norm_
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.shard import shard_layers
from nemo_like.distributed.weights.materialize import materialize
from nemo_like.distributed.weights.state_dict import get_model_state, set_model_state
from tests.checks import assert_bitwise, gradients_of, weights_of
from tests.models.tiny import Decoder, tokens
from tests_distributed.spawn import on_ranks, run_ranks


def _decoder(meta: bool = False) -> Decoder:
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        return Decoder(layers=2)


def _shard(model: Decoder) -> None:
    mesh = build_mesh(tp=2)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard_layers(model, list(model.layers), mesh)


@on_ranks(4)
def test_materialize_train_clip_and_save(rank: int, world_size: int) -> None:
    single = _decoder()
    single(tokens()).backward()

    model = _decoder(meta=True)
    _shard(model)
    materialize(model, state_dict=single.state_dict())
    weight = model.layers[0].up.weight
    assert isinstance(weight, DTensor) and weight.device_mesh.ndim == 2
    assert weight.to_local().numel() == weight.numel() // 4
    model(tokens().chunk(2)[rank // 2]).backward()
    # Half batches are added in another order than the whole one.
    torch.testing.assert_close(gradients_of(model), gradients_of(single), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        clip_grad_norm_(model, 0.1), torch.nn.utils.clip_grad_norm_(single.parameters(), 0.1), rtol=1e-5, atol=0
    )

    whole = [get_model_state(model, full=True)]
    torch.distributed.broadcast_object_list(whole)
    assert_bitwise(whole[0], single.state_dict())
    other = _decoder()
    _shard(other)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    set_model_state(other, whole[0])
    assert torch.equal(other(tokens()), model(tokens()))


def _drawn(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    model = _decoder(meta=True)
    _shard(model)
    materialize(model, seed=3)
    return weights_of(model)


def test_drawn_weights_are_those_of_one_device() -> None:
    single: nn.Module = _decoder(meta=True)
    materialize(single, seed=3)
    assert_bitwise(run_ranks(4, _drawn), [weights_of(single)] * 4)
