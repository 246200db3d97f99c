"""`parallelize` on several ranks: every mode to the bit, structure, communication, what strategies are told, refusals."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from nemo_like import DDP, FSDP2, TensorParallel, parallelize
from nemo_like.activation_checkpointing import is_checkpointed
from nemo_like.comparison import compare
from tests.checks import assert_bitwise, backward, gradients_of, refused_unchanged, seeded, update, whole
from tests.models.decoders import NAMES, batch, build, loss_of
from tests.models.tiny import Headed
from tests_distributed.counting import CountCollectives
from tests_distributed.spawn import on_ranks, run_ranks

MODES = ("none", "full", "selective", "submodule")


@on_ranks(2)
def test_structure(rank: int, world_size: int) -> None:
    model = build("llama")
    assert parallelize(model, ac="full") is model
    for layer in model.model.layers:
        assert is_checkpointed(layer) and isinstance(layer, FSDPModule)  # the unit is around the wrapper
    assert isinstance(model, FSDPModule)
    ddp = parallelize(build("llama"), "ddp", "full")
    assert isinstance(ddp, DistributedDataParallel) and is_checkpointed(ddp.module.model.layers[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["plain", "llama"])
@on_ranks(2)
def test_checkpointing_gathers_no_parameter_again(rank: int, world_size: int, name: str) -> None:
    # Known failure 7: a reentrant replay gathers twice.
    counts = {ac: [] for ac in MODES}
    for ac in MODES:
        model = parallelize(build(name), ac=ac)
        for _ in range(2):
            with CountCollectives() as counted:
                loss_of(model, batch(2)).backward()
            counts[ac].append(counted.gathers)
    assert counts["none"][0] > 0
    assert all(counts[ac] == counts["none"] for ac in MODES), counts


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_accumulation_without_sync_is_the_same_in_every_mode(rank: int, world_size: int, name: str) -> None:
    results = {}
    for ac in MODES:
        model = parallelize(build(name), ac=ac)
        torch.manual_seed(rank)
        for index in range(3):
            model.set_requires_gradient_sync(index == 2)
            (loss_of(model, batch(2, seed=10 * rank + index)) / 3).backward()
        results[ac] = [p.grad.to_local() for p in model.parameters()]
    assert_bitwise(list(results.values()), [results["none"]] * len(MODES))


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(tp=3), "tp=3 does not divide the 2 ranks"),
        (dict(tp=TensorParallel(1, sequence_parallel=True)), "tp is 1"),
        (dict(dp_replicate=3), "dp_replicate=3 does not divide the 2 ranks"),
        (dict(strategy=FSDP2(reshard_after_forward=3)), "reshard_after_forward is 3"),
        (dict(tp=2.0), "tp is 2.0"),
        (dict(precision="bf17"), "precision is 'bf17'"),
        (dict(strategy="nccl"), "strategy is 'nccl'"),
        (dict(strategy=None), "strategy is None"),
        (dict(tp=0), "tp is 0"),
        (dict(strategy="single", dp_replicate=2), "strategy='single' has no replicas"),
        (dict(device="cuda:99"), "device is 'cuda:99'"),
    ],
)
@on_ranks(2, timeout=60)
def test_bad_input_is_an_error_on_every_rank_and_nobody_hangs(
    rank: int, world_size: int, arguments: dict, message: str
) -> None:
    model = build("plain")
    with refused_unchanged(model, message, (ValueError, TypeError)):
        parallelize(model, **arguments)
    parallelize(model)  # still fresh, and no rank is left waiting
    loss_of(model, batch(2)).backward()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("dp_sharded",), "Did you mean 'dp_shard'"),
        (("dp_replicate",), "'dp_shard' is missing"),
        (("tp", "dp_shard"), "order"),
    ],
)
@on_ranks(2)
def test_a_mesh_with_wrong_axes_is_refused(rank: int, world_size: int, names: tuple[str, ...], message: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,) + (1,) * (len(names) - 1), mesh_dim_names=names)
    with pytest.raises(ValueError, match=message):
        parallelize(build("plain"), mesh=mesh)


@on_ranks(4)
def test_a_frameworks_own_mesh(rank: int, world_size: int) -> None:
    model = parallelize(build("llama"), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    loss_of(model, batch(2, seed=rank)).backward()
    local = sum(p.to_local().numel() for p in model.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert abs(local / total - 0.5) < 0.01, local / total
    for p in model.parameters():  # both replicas end with the same gradient
        both = [torch.empty_like(p.grad.to_local()) for _ in range(4)]
        dist.all_gather(both, p.grad.to_local())
        assert torch.equal(both[rank], both[(rank + 2) % 4])


@on_ranks(2)
def test_tied_weights_stay_tied_and_every_shard_trains(rank: int, world_size: int) -> None:
    model = parallelize(build("gemma3"), ac="selective")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.lm_head.weight.full_tensor().clone()
    for _ in range(2):
        loss_of(model, batch(2, seed=rank)).backward()
        update(optimizer)
    after = model.lm_head.weight.full_tensor()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # Known failure 12: every shard of the tied weight is updated, the last one too.
    assert all(not torch.equal(a, b) for a, b in zip(before.chunk(world_size), after.chunk(world_size), strict=True))


def _step(name: str, strategy: str, ac: str, dtype: str, ids: torch.Tensor, **more: int) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step by the names that the model shows."""
    model = parallelize(build(name), strategy=strategy, ac=ac, precision=None if dtype == "fp32" else dtype, **more)
    torch.manual_seed(7)
    loss = backward(loss_of(model, ids))
    named = {key.removeprefix("module."): p for key, p in model.named_parameters()}
    assert list(named) == [key for key, _ in build(name).named_parameters()]
    return {"loss": loss.detach(), **{key: whole(p.grad) for key, p in named.items()}}


def _compare(rank: int, name: str, strategy: str, dtype: str, dp_replicate: int) -> None:
    ids = batch(2, seed=rank)
    expected = _step(name, strategy, "none", dtype, ids, dp_replicate=dp_replicate)
    assert all(torch.isfinite(tensor).all() for tensor in expected.values())
    for ac in MODES[1:]:
        assert_bitwise(_step(name, strategy, ac, dtype, ids, dp_replicate=dp_replicate), expected, ac)


@pytest.mark.few(7)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_single(name: str, dtype: str) -> None:
    _compare(0, name, "single", dtype, 1)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("strategy", "ranks", "dp_replicate"), [("ddp", 2, 1), ("fsdp2", 2, 1), ("fsdp2", 4, 2)])
@on_ranks(timeout=180)
def test_ranks(rank: int, ranks: int, name: str, strategy: str, dp_replicate: int, dtype: str) -> None:
    _compare(rank, name, strategy, dtype, dp_replicate)


def _compared(rank: int, world_size: int, strategy: str) -> list[tuple[str, str]]:
    sample = {"input_ids": batch(1), "labels": batch(1)}
    results = compare(build("llama"), sample, ["sequential", "torch-full"], torch.device("cpu"), strategy, runs=1)
    assert results.about["ranks"] == world_size
    return [(row["mode"], row["gradients"]) for row in results.rows]


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_a_comparison_finds_the_same_gradients(strategy):
    names = ["none", "sequential", "torch-full"]
    assert run_ranks(2, _compared, strategy, timeout=120) == [[(name, "bitwise") for name in names]] * 2


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """With another head in one rank's first step."""
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(inputs, "b" if rank == step == 0 else "a").square().mean()


def _two_steps(rank: int, world_size: int, strategy: Any, ac: str) -> dict[str, torch.Tensor]:
    model = parallelize(seeded(Headed), strategy, ac)
    for step in range(2):
        _loss(model, rank, step).backward()
    return gradients_of(model.module)


@pytest.mark.parametrize("ac", ["none", "full", "selective", "sequential"])
def test_unused_parameters(ac: str) -> None:
    reference = seeded(Headed)
    for step in range(2):
        for rank in range(2):
            (_loss(reference, rank, step) / 2).backward()
    results = run_ranks(2, _two_steps, DDP(find_unused_parameters=True, bucket_cap_mb=0.0001), ac)
    torch.testing.assert_close(results, [gradients_of(reference)] * 2)


def test_without_the_option_torch_says_so() -> None:
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        run_ranks(2, _two_steps, "ddp", "full")


def _settings(rank: int, world_size: int, strategy: Any) -> tuple[int, timedelta]:
    model = parallelize(seeded(Headed), strategy, "full")
    bucket = model.bucket_bytes_cap if isinstance(model, nn.parallel.DistributedDataParallel) else 0
    return bucket, dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout


@pytest.mark.parametrize("strategy", [DDP(bucket_cap_mb=2, timeout_seconds=90), FSDP2(timeout_seconds=90)])
def test_bucket_size_and_timeout(strategy: Any) -> None:
    bucket = 2 << 20 if isinstance(strategy, DDP) else 0
    assert run_ranks(2, _settings, strategy, init_group=False) == [(bucket, timedelta(seconds=90))] * 2


def test_wrong_options() -> None:
    for kind in (DDP, FSDP2):
        for seconds in (0, -1, True, "60", float("inf")):
            with pytest.raises(ValueError, match=r"timeout_seconds is .*above 0"):
                kind(timeout_seconds=seconds)
    for size in (0, -1, True, "25"):
        with pytest.raises(ValueError, match=r"bucket_cap_mb is .*above 0"):
            DDP(bucket_cap_mb=size)
    with pytest.raises(TypeError, match="find_unused_parameters is 1"):
        DDP(find_unused_parameters=1)


def _own_loss(rank: int, world_size: int) -> list[tuple[float, torch.Tensor]]:
    model = parallelize(build("llama").eval(), ac="full", tp=TensorParallel(2, loss_parallel=True), device="cpu")
    tokens = batch()
    ways = r"with torch\.distributed\.tensor\.parallel\.loss_parallel\(\): model.*parallelize\(\.\.\., loss='chunked'\)"
    with pytest.raises(RuntimeError, match=ways):
        model(input_ids=tokens, labels=tokens)
    model(input_ids=tokens)  # without labels there is nothing to refuse
    with loss_parallel():
        loss = backward(model(input_ids=tokens, labels=tokens).loss)
    found = [(loss.full_tensor().item(), model.lm_head.weight.grad.full_tensor())]
    chunked = build("llama").eval()
    chunked.training = True  # chunks are for training; no layer drops anything
    chunked = parallelize(chunked, ac="full", tp=TensorParallel(2, loss_parallel=True), loss="chunked", device="cpu")
    loss = backward(chunked(input_ids=tokens, labels=tokens).loss)  # needs no context
    return [*found, (loss.item(), chunked.lm_head.weight.grad.full_tensor())]


def test_a_models_own_loss_on_cut_logits() -> None:
    """Within torch's context, or in chunks: the two ways that the error names."""
    reference, tokens = build("llama").eval(), batch()
    loss = backward(reference(input_ids=tokens, labels=tokens).loss)
    for value, gradient in [each for found in run_ranks(2, _own_loss, timeout=120) for each in found]:
        assert value == pytest.approx(loss.item(), rel=1e-6)
        torch.testing.assert_close(gradient, reference.lm_head.weight.grad)
