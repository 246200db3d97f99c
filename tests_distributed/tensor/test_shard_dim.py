"""Parameters that the ranks do not divide on dim 0, experts above all, are cut on another dim."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from nemo_like import Job, StepSpec, materialize, parallelize
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.shard import shard_layers
from nemo_like.distributed.units import shard_dim
from nemo_like.distributed.weights.state_dict import get_model_state
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.planner import describe
from nemo_like.planning.query import PlanQuery
from tests.checks import labelled, on_meta, seeded, update
from tests.models.tiny import made
from tests_distributed.allocated import step_peak_bytes
from tests_distributed.fake import fake_rank
from tests_distributed.spawn import on_ranks, run_ranks

safetensors = pytest.importorskip("safetensors.torch")


def _mixtral(experts: int, **sizes: int) -> nn.Module:
    shape = dict(
        hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=64,
    ) | sizes  # fmt: skip
    return seeded(
        made, "Mixtral", **shape, use_cache=False, num_local_experts=experts, num_experts_per_tok=2,
        experts_implementation="grouped_mm",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((8, 28672, 4096), 64, 1),  # 56 ranks would hold padding
        ((8, 4096), 64, 1),
        ((8, 30, 64), 64, 2),  # 30 is not divided either
        ((8, 30, 50), 64, 0),
        ((64, 28672, 4096), 64, 0),
        ((128256, 4096), 1024, 0),  # 0.6 % of padding
        ((5, 4), 4, 1),  # 60 %
        ((7, 4), 4, 0),  # 14 %
        ((3,), 2, 0),
    ],
)
def test_the_dim(shape: tuple[int, ...], ranks: int, dim: int) -> None:
    assert shard_dim(torch.empty(shape, device="meta"), ranks) == dim


def test_a_rank_of_64_holds_its_share_of_8_experts() -> None:
    model = on_meta(
        _mixtral, 8, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000,
    )  # fmt: skip
    total = sum(p.numel() for p in model.parameters())
    with fake_rank(63, 64):
        shard_layers(model, list(model.model.layers), build_mesh(device_type="cpu"))
        cut = {name for name, p in model.named_parameters() if p.placements == (Shard(1),)}
        assert cut == {f"model.layers.{i}.mlp.{name}" for i in (0, 1) for name in EXPERTS}
        held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    assert held == pytest.approx(total / 64, rel=0.01)


EXPERTS = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")


def test_padding_is_no_longer_what_binds_on_64_ranks() -> None:
    model = on_meta(_mixtral, 8, num_hidden_layers=2, hidden_size=1024, intermediate_size=3584)
    sample = {"input_ids": torch.zeros(1, 32, dtype=torch.long), "labels": torch.zeros(1, 32, dtype=torch.long)}
    query = PlanQuery.from_model(model, sample, Job.of(world_size=64, gpu=resolve_device("h100-80gb")))
    exact = sum(p.numel() * p.element_size() for p in model.parameters()) / 64
    assert query.stages[0].sharding.params == pytest.approx(exact, rel=0.01)
    assert query.stages[0].sharding.params - query.stages[0].sharding.padding == exact


@pytest.mark.parametrize(("ranks", "experts"), [(2, 3), (4, 6)])
@on_ranks(timeout=120)
def test_gradients_are_those_of_the_whole_model(rank: int, ranks: int, experts: int) -> None:
    """How many parameters are cut on another dim; and those whose gradient is not the mean of the ranks'."""
    batches = [torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    wanted: dict[str, torch.Tensor] = {}
    for batch in batches:
        whole = _mixtral(experts)
        whole(input_ids=batch, labels=batch).loss.backward()
        for name, param in whole.named_parameters():
            wanted[name] = wanted.get(name, 0) + param.grad
    model = parallelize(_mixtral(experts), "fsdp2", "full", device="cpu")
    model(input_ids=batches[rank], labels=batches[rank]).loss.backward()
    wrong, cut = [], 0
    for name, param in model.named_parameters():
        cut += param.placements != (Shard(0),)
        found = param.grad.full_tensor()
        mean = wanted[name] / ranks
        same = torch.equal(found, mean) if ranks == 2 else torch.allclose(found, mean, rtol=1e-5, atol=1e-7)
        wrong += [] if same else [name]
    assert (cut, wrong) == (9, [])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "experts", "precision", "mode"),
    [
        (2, 3, None, "full"),
        (2, 3, "bf16", "full"),
        *(
            pytest.param(4, 6, *case, marks=pytest.mark.long)
            for case in ((None, "full"), (None, "none"), ("bf16", "none"))
        ),
    ],
)
@on_ranks(timeout=150)
def test_the_predicted_peak_is_the_measured_one(
    rank: int, ranks: int, experts: int, precision: str | None, mode: str
) -> None:
    """Without checkpointing the peak is where a layer is gathered ahead, of which gloo makes a copy."""
    sample = labelled(torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(rank)))
    model, step = _mixtral(experts), StepSpec(keeps_output=False, optimizer="sgd")
    setup = Job.of(world_size=ranks, step=step, precision=precision)
    query = PlanQuery.from_model(model, sample, setup.change(gpu=resolve_device("cpu")))
    plan = describe(query, query.uniform(mode), mode)
    model = parallelize(model, "fsdp2", mode, precision=precision, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run() -> None:
        model(**sample).loss.backward()
        update(optimizer)

    run()
    predicted, measured = plan.peak_bytes, step_peak_bytes(model, optimizer, run)
    assert abs(predicted - measured) <= 0.002 * measured


def _filled(rank: int, world_size: int, path: str) -> list[str]:
    """Parameters that are not those of the whole model, filled from it in memory, from a file, and drawn."""
    whole = dict(_mixtral(3).named_parameters())
    wrong = []
    for source in ({"state_dict": dict(whole)}, {"checkpoint": path}):
        model = materialize(parallelize(on_meta(_mixtral, 3), "fsdp2", "none", device="cpu"), **source)
        wrong += [name for name, p in model.named_parameters() if not torch.equal(p.full_tensor(), whole[name])]
        state = get_model_state(model)
        wrong += [name for name, value in whole.items() if not torch.equal(state[name].full_tensor(), value)]
    return wrong


def test_weights_are_filled_in_and_gathered(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.save_file({name: p.detach() for name, p in _mixtral(3).named_parameters()}, file)
    assert run_ranks(2, _filled, str(file), timeout=120) == [[], []]
