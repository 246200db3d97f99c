"""What all ranks must have in common before a model is changed: options, layers, dtypes, shapes, and the weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import parallelize
from nemo_like.distributed.consistency_checks import check_same_batch, compare_batches, sharing_groups
from nemo_like.distributed.mesh import build_mesh
from nemo_like.options import FSDP2, PipelineParallel
from tests.checks import assert_bitwise, on_meta, seeded, whole
from tests.models.blocks import Layer, in_turn
from tests.models.decoders import batch, build
from tests.models.tiny import Block, Decoder
from tests_distributed.counting import heard
from tests_distributed.spawn import on_ranks, run_ranks


def _differing(rank: int, world_size: int, by_rank: list[dict[str, Any]]) -> str:
    model = build("plain")
    before = dict(model.named_modules())
    with pytest.raises(ValueError) as raised:
        parallelize(model, **by_rank[rank])
    assert dict(model.named_modules()) == before
    parallelize(model)  # still fresh, and no rank is left waiting
    return str(raised.value)


@pytest.mark.parametrize(
    ("by_rank", "said"),
    [
        (
            [dict(strategy=FSDP2(True)), dict(strategy=FSDP2(False))],
            ["strategy is FSDP2(reshard_after_forward=True) ", "and FSDP2(reshard_after_forward=False) on rank 1"],
        ),
        ([dict(precision="bf16"), dict()], ["precision is 'bf16' on rank 0 and None on rank 1"]),
        ([dict(ac="ful"), dict()], ["the call is refused (ac is 'ful'", "on rank 0 and absent on rank 1"]),
        (
            [dict(ac="full"), dict(ac="none", dp_replicate=2)],
            ["ac is 'full' on rank 0 and 'none' on rank 1", "dp_replicate is 1 on rank 0 and 2 on rank 1"],
        ),
        ([dict(strategy="fsdp2"), dict(strategy="ddp")], ["strategy is 'fsdp2' on rank 0 and 'ddp' on rank 1"]),
    ],
)
def test_options_that_differ_are_named_on_every_rank(by_rank: list[dict[str, Any]], said: list[str]) -> None:
    messages = run_ranks(2, _differing, by_rank)
    assert messages[0] == messages[1]
    for sentence in said:
        assert sentence in messages[0], messages[0]
    assert ("strategy is" in messages[0]) == any("strategy is" in sentence for sentence in said), messages[0]


def test_ranks_with_the_same_value_are_named_together() -> None:
    messages = run_ranks(3, _differing, [dict(compile=True), dict(), dict(compile=True)])
    assert all("compile is 'inductor' on ranks 0, 2 and None on rank 1" in message for message in messages), messages


CHANGES: dict[str, Callable[[Decoder], Any]] = {
    "layers": lambda model: model.layers.append(Block()),
    "dtype": lambda model: model.head.to(torch.bfloat16),
    "frozen": lambda model: model.embed.requires_grad_(False),
    "buffer": lambda model: model.register_buffer("mean", torch.zeros(2)),
    "meta": lambda model: model.to("meta"),
}


def _other_model(rank: int, world_size: int, how: str) -> str:
    model = Decoder()
    if rank == 1:
        CHANGES[how](model)
    with pytest.raises(ValueError) as raised:
        parallelize(model)
    assert not any(hasattr(p, "placements") for p in model.parameters())
    return str(raised.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("layers", "layers.3.norm.weight is absent on rank 0 and float32 (16,) on rank 1"),
        ("dtype", "head.weight is float32 (64, 16) on rank 0 and bfloat16 (64, 16) on rank 1"),
        ("buffer", "mean is absent on rank 0 and float32 (2,) on rank 1"),
        ("frozen", "embed.weight is float32 (64, 16) on rank 0 and float32 (64, 16), frozen on rank 1"),
        ("meta", "embed.weight is float32 (64, 16) on rank 0 and float32 (64, 16), on the meta device on rank 1"),
    ],
)
def test_models_that_differ_are_an_error_on_every_rank(how: str, said: str) -> None:
    messages = run_ranks(2, _other_model, how)
    assert all(said in message for message in messages), messages


@on_ranks(2)
def test_a_device_of_the_same_kind_is_no_difference(rank: int, world_size: int) -> None:
    """Spellings and places that mean the same are no difference."""
    parallelize(build("plain"), ("fsdp2", "FSDP2")[rank], device=("cpu", torch.device("cpu", 0))[rank])


def _weights(rank: int, world_size: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """A rank's weights before and after, whole."""
    model = build("plain", seed=rank)
    model.register_buffer("scale", torch.tensor([1.5 + rank]))
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parallelize(model, **options)
    return first, {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("options", [{}, dict(dp_replicate=2)])
def test_every_rank_has_the_first_ranks_weights(options: dict[str, Any]) -> None:
    (first, now), (_, on_the_other) = run_ranks(2, _weights, options)
    assert_bitwise([now, on_the_other], [first, first])


def _packed() -> nn.Module:
    """Weights in odd layouts and dtypes, which a checksum has to read without changing them."""
    return Layer(
        lambda model, x: in_turn(model.layers, x),
        layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)),
        transposed=nn.Buffer(torch.randn(3, 5).t()),
        flags=nn.Buffer(torch.rand(7) > 0.5),
        none_at_all=nn.Buffer(torch.empty(0)),
        scalar=nn.Buffer(torch.randn(()).to(torch.complex64)),
        expanded=nn.Buffer(torch.randn(1, 4).expand(3, 4)),
    )


def _odd_tensors(rank: int, world_size: int) -> list[torch.Tensor]:
    return [b.clone() for b in parallelize(seeded(_packed, seed=rank), layers=["layers.*"]).buffers()]


def test_buffers_of_every_layout_come_from_the_first_rank() -> None:
    assert_bitwise(*run_ranks(2, _odd_tensors))


def _said(rank: int, world_size: int, differ: bool) -> list[str]:
    lines = heard()
    for _ in range(2):
        parallelize(build("plain", seed=rank if differ else 0))
    return [line for line in lines if "weights" in line]


def test_a_broadcast_is_said_once_and_only_where_there_was_one() -> None:
    first, second = run_ranks(2, _said, True)
    assert len(first) == 1 and "rank 0" in first[0] and second == []
    assert run_ranks(2, _said, False) == [[], []]


@on_ranks(2)
def test_a_model_without_weights_is_left_as_it_is(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    model = on_meta(build, "plain", seed=rank)
    parallelize(model)
    assert all(p.is_meta for p in model.parameters())


AXES: list[dict[str, Any]] = [{"cp": 2}, {"tp": 2}, {"pp": PipelineParallel(2, microbatches=2)}]


def _rows(number: int, rows: int = 4) -> dict[str, Any]:
    ids = torch.randint(1, 48, (rows, 12), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids.clone()}


def _call(model: Any, given: dict[str, Any]) -> Any:
    return model.step(**given) if hasattr(model, "step") else model(**given).loss


def _other_batches(rank: int, world_size: int, options: dict[str, Any]) -> str:
    sample = {"sample_input": _rows(0, 2)} if "pp" in options else {}
    model = parallelize(build("llama"), ac="none", **options, **sample)
    with pytest.raises(ValueError) as raised:
        _call(model, _rows(0) | {"labels": _rows(rank)["labels"]})
    return str(raised.value)


@pytest.mark.parametrize("options", AXES, ids=lambda options: next(iter(options)))
def test_ranks_that_share_batches_must_be_given_the_same(options: dict[str, Any]) -> None:
    """On every axis, in the first call, on every rank, and by the argument's name."""
    first, second = run_ranks(2, _other_batches, options)
    assert first == second
    assert f"Ranks along {next(iter(options))} got different batches: labels is int64 (4, 12) with contents " in first
    assert " on rank 0 and " in first and "input_ids" not in first, first


@pytest.mark.few(1)
@pytest.mark.parametrize("options", AXES, ids=lambda options: next(iter(options)))
@on_ranks(4)
def test_data_parallel_ranks_have_batches_of_their_own(rank: int, world_size: int, options: dict[str, Any]) -> None:
    mesh = build_mesh(**dict.fromkeys(options, 2))
    asked = options | {"sample_input": _rows(0, 2)} if "pp" in options else {}
    model, other = (parallelize(build("llama"), ac="none", mesh=mesh, **asked) for _ in range(2))
    _call(model, _rows(mesh["dp_shard"].get_local_rank()))
    with pytest.raises(ValueError, match="got different batches: input_ids is"):
        _call(other, _rows(rank))


@on_ranks(2)
def test_what_differs_in_a_batch_is_seen_and_nothing_else(rank: int, world_size: int) -> None:
    groups = sharing_groups(build_mesh(tp=2), ("tp",))
    numbers = torch.arange(12.0).reshape(3, 4)
    pairs: dict[str, tuple[Any, Any]] = {
        "rows in another order": (numbers, numbers.flip(0)),
        "another shape": (numbers, numbers.reshape(4, 3)),
        "another dtype": (numbers, numbers.double()),
        "one bit": (numbers.bfloat16(), numbers.bfloat16().where(numbers != 5, 5.03125)),
        "true for false": (numbers > 4, numbers > 5),
        "inside a list": ([numbers, 1], [numbers + 1, 1]),
        "a number": (3, 4),
        "nothing": (numbers, None),
    }
    same = {"a view": (numbers, numbers.t().contiguous().t()), "not a number": (numbers / 0 * 0, numbers / 0 * 0)}
    for name, pair in same.items():
        check_same_batch({name: pair[rank]}, groups)
    seen = []
    for name, pair in pairs.items():
        try:
            check_same_batch({"x": numbers, name: pair[rank]}, groups)
        except ValueError:
            seen.append(name)
    assert sorted(set(pairs) - set(seen)) == []


def _later(rank: int, world_size: int) -> list[float]:
    """Only the first call compares."""
    model = Decoder(layers=1, width=16)
    compare_batches(model, build_mesh(tp=2))
    first, second = batch(2) % 8, batch(2) % 8 + rank
    return [model(ids).sum().item() for ids in (first, second)]


def test_only_the_first_call_compares_batches() -> None:
    (first, second), (again, other) = run_ranks(2, _later)
    assert first == again and second != other
