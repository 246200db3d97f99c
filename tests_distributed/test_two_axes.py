"""FSDP2 over tensor parallelism: the step of one rank, and each helper is right on parameters that are cut up twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nemo_like import parallelize
from nemo_like.distributed.gradients import clip_grad_norm_
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.shard import shard_layers
from nemo_like.distributed.weights.materialize import materialize
from nemo_like.distributed.weights.state_dict import get_model_state, set_model_state
from nemo_like.options import TensorParallel
from tests.checks import gradients_of
from tests.models.decoders import build
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
    loss = single(tokens())
    loss.backward()

    model = _decoder(meta=True)
    _shard(model)
    materialize(model, state_dict=single.state_dict())
    weight = model.layers[0].up.weight
    assert isinstance(weight, DTensor) and weight.device_mesh.ndim == 2
    assert weight.to_local().numel() == weight.numel() // 4
    halves = model(tokens().chunk(2)[rank // 2])
    halves.backward()
    expected = {name: param.grad for name, param in single.named_parameters()}
    for name, gradient in gradients_of(model).items():
        # Half batches are added in another order than the whole one.
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    torch.testing.assert_close(
        clip_grad_norm_(model, 0.1), torch.nn.utils.clip_grad_norm_(single.parameters(), 0.1), rtol=1e-5, atol=0
    )

    state = get_model_state(model, full=True)
    whole = [state]
    torch.distributed.broadcast_object_list(whole)
    for name, tensor in single.state_dict().items():
        assert torch.equal(whole[0][name], tensor), name
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
    return {name: param.full_tensor().detach() for name, param in model.named_parameters()}


def test_drawn_weights_are_those_of_one_device() -> None:
    single: nn.Module = _decoder(meta=True)
    materialize(single, seed=3)
    for drawn in run_ranks(4, _drawn):
        for name, param in single.named_parameters():
            assert torch.equal(drawn[name], param), name


@on_ranks(2)
def test_bad_tensor_parallel_arguments_change_nothing(rank: int, world_size: int) -> None:
    model = build("llama")
    before = dict(model.named_modules())
    for arguments, message in (
        (dict(tp=3), "tp=3 does not divide the 2 ranks"),
        (dict(tp=TensorParallel(1, sequence_parallel=True)), "tp is 1"),
    ):
        with pytest.raises(ValueError, match=message):
            parallelize(model, **arguments)
        assert dict(model.named_modules()) == before
