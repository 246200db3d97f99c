"""Ranks that are not there: next to two that are, and in one process what each of 8, 64 or 1024 would hold."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from nemo_like import Job, dry_run, parallelize
from nemo_like.activation_checkpointing import is_checkpointed
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.shard import shard_layers
from nemo_like.torch_compat import FakeRanks, fake_ranks
from tests.checks import on_meta
from tests.models.decoders import build
from tests.models.tiny import Decoder
from tests_distributed.fake import fake_rank
from tests_distributed.spawn import on_ranks, run_ranks


def _sums(mesh: DeviceMesh, group: dist.ProcessGroup) -> list[float]:
    """What two ranks add up: by the group of all, a group of their own, the mesh, and as a DTensor."""
    plain, own = torch.ones(1), torch.ones(1)
    dist.all_reduce(plain)
    dist.all_reduce(own, group=group)
    by_mesh = functional.all_reduce(torch.ones(1), "sum", mesh.get_group())
    parts = distribute_tensor(torch.ones(4, 2), mesh)
    return [plain.item(), own.item(), by_mesh.item(), float((parts.sum() + parts.mean()).full_tensor())]


def _next_to_real_ones(rank: int, world_size: int) -> tuple[list[list[float]], list[int]]:
    mesh, group = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)), dist.new_group([0, 1])
    sums, sizes = [_sums(mesh, group)], []
    with fake_ranks(3, 64):
        inside = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp_shard", "tp"))
        functional.all_reduce(torch.ones(2), "sum", inside["tp"].get_group())
        sizes += [dist.get_world_size(), dist.get_rank(), inside["tp"].size()]
        with fake_ranks(0, 2):
            sizes.append(dist.get_world_size())
        sizes.append(dist.get_world_size())
    sums.append(_sums(mesh, group))
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), fake_ranks(0, 4):
            raise error
        sums.append(_sums(mesh, group))
    sums.append(_sums(init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",)), dist.new_group([0, 1])))
    return sums, [*sizes, dist.get_world_size(), dist.get_rank()]


@pytest.mark.compat
def test_fake_ranks_leave_the_real_ones_as_they_were() -> None:
    for rank, (sums, sizes) in enumerate(run_ranks(2, _next_to_real_ones)):
        assert sums == [[2.0, 2.0, 2.0, 9.0]] * 5
        assert sizes == [64, 3, 8, 2, 64, 2, rank]


def _peak(axes: dict[str, Any]) -> int:
    ids = torch.zeros(2, 8, dtype=torch.long)
    model, batch = (build("llama"), {"input_ids": ids, "labels": ids}) if "tp" in axes else (Decoder(1), {"ids": ids})
    return dry_run(model, Job.of(ac="full", world_size=64, **axes), batch).peak_bytes


def _dry_run(rank: int, world_size: int, axes: dict[str, Any], ranks: tuple[int, ...]) -> tuple[int, float]:
    peak = _peak(axes) if rank in ranks else 0
    total = torch.ones(1)
    dist.all_reduce(total)
    return peak, total.item()


@pytest.mark.few(1)
@pytest.mark.parametrize(("axes", "ranks"), [({"dp_replicate": 2}, (1,)), ({"tp": 2}, (0, 1))])
def test_a_dry_run_in_a_job_is_that_of_a_process_of_its_own(axes: dict[str, Any], ranks: tuple[int, ...]) -> None:
    alone = _peak(axes)
    assert run_ranks(2, _dry_run, axes, ranks) == [(alone if rank in ranks else 0, 2.0) for rank in range(2)]


# A process for each rank, and models that are planned, split and run (2 s for each).
@pytest.mark.few(1)
@pytest.mark.parametrize("axes", [[("mixtral", "ep")], [("llama", "tp"), ("llama", "cp")]])
@on_ranks(2)
def test_a_budget_is_planned_on_fake_ranks_in_a_job_whose_ranks_work_afterwards(
    rank: int, world_size: int, axes: list[tuple[str, str]]
) -> None:
    ids, found = torch.arange(32).view(2, 16) % 50, []
    for family, axis in axes:
        torch.manual_seed(0)
        batch = {"input_ids": ids, "labels": ids}
        model = parallelize(build(family), ac="50%", sample_input=batch, device="cpu", **{axis: 2})
        model(**batch, use_cache=False).loss.backward()
        found.append(_sums(init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)), dist.new_group([0, 1])))
    assert found == [[2.0, 2.0, 2.0, 9.0]] * len(axes)


def test_fake_ranks_are_entered_again_after_real_groups_were_destroyed() -> None:
    ranks = FakeRanks(0, 4)
    with ranks:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    with ranks:
        assert dist.get_world_size() == 4
        functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", mesh.get_group()))
    ranks.forget()


def _llama3_8b(layers: int = 4, vocab_size: int = 131072) -> nn.Module:
    """The block sizes of Llama 3 8B, on the meta device; 4 layers tell as much as 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=vocab_size,
        num_hidden_layers=layers, use_cache=False,
    )  # fmt: skip
    return on_meta(LlamaForCausalLM, config)


def _held(model: nn.Module, local: bool) -> int:
    held = (p.to_local() if local and isinstance(p, DTensor) else p for p in model.parameters())
    return sum(p.numel() * p.element_size() for p in held)


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize(("world_size", "replicas"), [(8, 1), (8, 2), (64, 1), (64, 8), (1024, 1), (1024, 8)])
def test_a_rank_holds_its_share(world_size: int, replicas: int, where: str) -> None:
    model = _llama3_8b()
    total = _held(model, local=False)
    with fake_rank(0 if where == "first" else world_size - 1, world_size):
        mesh = build_mesh(dp_replicate=replicas, device_type="cpu")
        shard_layers(model, list(model.model.layers), mesh)
        assert _held(model, local=True) == pytest.approx(total / (world_size / replicas), rel=0.01)
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
    # named_modules order: the root, embedding, layers, then the final norm and the head as one unit of two modules.
    assert units == [model, model.model.embed_tokens, *layers, model.model.norm, model.lm_head]
    for layer in layers:
        assert is_checkpointed(layer) == (ac != "submodule")
        inside = [m for m in layer.modules() if m is not layer]
        assert not any(isinstance(m, FSDPModule) for m in inside)
        assert any(is_checkpointed(m) for m in inside) == (ac == "submodule")


@pytest.mark.parametrize(
    ("make", "layers", "sharded", "ranks", "expected"),
    [
        # 128256 rows of Llama 3 over 1024 ranks: 1017 ranks hold 126, one holds the other 114, six hold none.
        (
            lambda: _llama3_8b(layers=1, vocab_size=128256), "model.layers", "lm_head", 1024,
            {0: 126, 1016: 126, 1017: 114, 1018: 0, 1023: 0},
        ),
        # No dimension divides: five of eight ranks hold one row, three hold none.
        (
            lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 5)), nn.Sequential(nn.Linear(5, 5))), "", "0.0", 8,
            dict(enumerate([1, 1, 1, 1, 1, 0, 0, 0])),
        ),
    ],
    ids=["a vocabulary of 128256", "5 rows"],
)  # fmt: skip
def test_uneven_sizes_are_padded_not_lost(
    make: Any, layers: str, sharded: str, ranks: int, expected: dict[int, int]
) -> None:
    rows = {}
    for rank in expected:
        model = make()
        with fake_rank(rank, ranks):
            shard_layers(model, list(model.get_submodule(layers)), build_mesh(device_type="cpu"))
            rows[rank] = model.get_submodule(sharded).weight.to_local().shape[0]
    assert rows == expected
