"""Shapes of large jobs, in one process: what each of 8, 64 or 1024 ranks would hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from nemo_like import parallelize
from nemo_like.activation_checkpointing.wrapper import CheckpointWrapper
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.shard import shard_layers
from tests_distributed.fake import fake_rank


def _llama3_8b(layers: int = 4, vocab_size: int = 131072) -> nn.Module:
    """The block sizes of Llama 3 8B, on the meta device; 4 layers tell as much as 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=vocab_size,
        num_hidden_layers=layers,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _bytes(model: nn.Module, local: bool) -> int:
    held = (p.to_local() if local and isinstance(p, DTensor) else p for p in model.parameters())
    return sum(p.numel() * p.element_size() for p in held)


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize(("world_size", "replicas"), [(8, 1), (8, 2), (64, 1), (64, 8), (1024, 1), (1024, 8)])
def test_a_rank_holds_its_share(world_size: int, replicas: int, where: str) -> None:
    model = _llama3_8b()
    total = _bytes(model, local=False)
    with fake_rank(0 if where == "first" else world_size - 1, world_size):
        mesh = build_mesh(dp_replicate=replicas, device_type="cpu")
        shard_layers(model, list(model.model.layers), mesh)
        share = total / (world_size / replicas)
        assert _bytes(model, local=True) == pytest.approx(share, rel=0.01)
        placements = (Shard(0),) if replicas == 1 else (Replicate(), Shard(0))
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor), name
            assert param.placements == placements, name
            assert param.device_mesh.shape == tuple(mesh.shape)


@pytest.mark.parametrize(("world_size", "replicas"), [(8, 1), (64, 8), (1024, 8)])
@pytest.mark.parametrize("ac", ["full", "selective", "submodule"])
def test_wrappers_stand_inside_of_units(world_size: int, replicas: int, ac: str) -> None:
    model = _llama3_8b()
    bare = [name for name, _ in model.named_parameters()]
    with fake_rank(0, world_size):
        parallelize(model, ac=ac, dp_replicate=replicas, device="cpu")
    assert isinstance(model, FSDPModule)
    assert [name for name, _ in model.named_parameters()] == bare
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    layers = list(model.model.layers)
    # named_modules order: the root, the layers, then the final norm and the head as one unit of two modules.
    assert units == [model, *layers, model.model.norm, model.lm_head]
    for layer in layers:
        assert isinstance(layer, CheckpointWrapper) == (ac != "submodule")
        inside = [m for m in layer.modules() if m is not layer]
        assert not any(isinstance(m, FSDPModule) for m in inside)
        assert any(isinstance(m, CheckpointWrapper) for m in inside) == (ac == "submodule")


def test_a_vocabulary_that_does_not_divide() -> None:
    """Llama 3's 128256 rows over 1024 ranks: 1017 ranks hold 126, one holds the other 114, six hold none."""
    rows = {}
    for rank in (0, 1016, 1017, 1018, 1023):
        model = _llama3_8b(layers=1, vocab_size=128256)
        with fake_rank(rank, 1024):
            shard_layers(model, list(model.model.layers), build_mesh(device_type="cpu"))
            rows[rank] = model.lm_head.weight.to_local().shape[0]
    assert rows == {0: 126, 1016: 126, 1017: 114, 1018: 0, 1023: 0}


def test_uneven_sizes_are_padded_not_lost() -> None:
    """5 rows over 8 ranks: five ranks hold one row, three hold none."""
    held = []
    for rank in range(8):
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 5)), nn.Sequential(nn.Linear(5, 5)))
        with fake_rank(rank, 8):
            shard_layers(model, list(model), build_mesh(device_type="cpu"))
            held.append(model[0][0].weight.to_local().shape[0])
    assert held == [1, 1, 1, 1, 1, 0, 0, 0]
