"""``precision="fp8"`` on two gloo ranks (emulated on the CPU): beside ``tp`` and ``ep``, and beside a memory budget."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from nemo_like import FSDP2, parallelize
from nemo_like.options import TensorParallel
from nemo_like.planning.planner import plan_for
from nemo_like.precision import cast_of, float8_linears, rowwise_of
from tests.checks import assert_bitwise, assert_near, backward, gradients_of, labelled, step
from tests.models.fit_models import llama, mixture
from tests_distributed.allocated import loop_peak_bytes
from tests_distributed.spawn import on_ranks, run_ranks

Found = tuple[float, dict[str, torch.Tensor]]


def _step(model: Any, words: int) -> Found:
    ids = torch.randint(words, (2, 32), generator=torch.Generator().manual_seed(0))
    return backward(model(input_ids=ids, labels=ids).loss).item(), gradients_of(model)


def _tensor(rank: int, world_size: int, word: str, modes: tuple[str, ...]) -> list[Found]:
    tp = TensorParallel(2, sequence_parallel=True)
    said: dict[str, Any] = {"precision": word, "device": "cpu"}
    ways = [{"ac": "none"}, *({"ac": ac, "tp": tp} for ac in modes)]
    return [_step(parallelize(llama(), **said, **way), 512) for way in ways]


@pytest.mark.few(1)
@pytest.mark.parametrize("modes", [("none", "selective"), ("none", "full")])
@pytest.mark.parametrize("word", ["fp8", "fp8-rowwise"])
def test_split_weights(word: str, modes: tuple[str, ...]) -> None:
    one, plain, *others = run_ranks(2, _tensor, word, modes, timeout=150)[0]
    assert_bitwise(others, [plain] * len(others))
    assert plain[0] == pytest.approx(one[0], rel=1e-3)
    # Partial sums round otherwise, and a last bit moves a value by a step of float8, an eighth of it.
    assert_near(plain[1], one[1], 0.125)


def _experts(rank: int, world_size: int) -> list[Found]:
    model = mixture().state_dict()

    def build() -> Any:
        made = mixture()
        made.load_state_dict(model)
        return made

    ways: list[dict[str, Any]] = [{"ac": "none"}, {"ac": "none", "ep": 2}, {"ac": "full", "ep": 2}]
    return [_step(parallelize(build(), precision="fp8", device="cpu", **way), 128) for way in ways]


@pytest.mark.few(1)
def test_split_experts() -> None:
    one, split, full = run_ranks(2, _experts, timeout=150)[0]
    assert_bitwise(full, split)
    # Results of a token's experts are added rank by rank: in another order than in one process, before they are rounded.
    assert split[0] == pytest.approx(one[0], rel=1e-5)
    assert_near(split[1], one[1], 0.05)  # three bits of mantissa


BUDGET = "3000KiB"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("cp", "word"), [(1, "fp8"), pytest.param(1, "fp8-rowwise", marks=pytest.mark.long), (2, "fp8")]
)
@on_ranks(2)
def test_sharded_layers_give_the_same_bits_and_peak_as_planned(rank: int, world_size: int, cp: int, word: str) -> None:
    sample = labelled(torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(rank // cp)))
    said = {"precision": word, "device": "cpu", "cp": cp, "sample_input": sample}
    plan = plan_for(llama(2), ac=BUDGET, sample_input=sample, gpu="cpu", precision=word, cp=cp, world_size=world_size)
    model = parallelize(llama(2), FSDP2(), ac=BUDGET, **said)
    assert_bitwise(step(model, **sample), step(parallelize(llama(2), FSDP2(), ac="none", **said), **sample))
    model.zero_grad()
    measured = loop_peak_bytes(model, sample)
    assert abs(plan.peak_bytes - measured) <= 0.01 * measured, (plan.peak_bytes, measured)
    assert {layer.label for layer in plan.layers} - {"none", "full"} or cp > 1


@on_ranks(2)
def test_weights_that_are_gathered_in_float8_take_no_budget(rank: int, world_size: int) -> None:
    ids = torch.zeros(4, 64, dtype=torch.long)
    with pytest.raises(ValueError, match=r"precision is 'fp8-gather'.*Use precision='fp8'"):
        parallelize(llama(), FSDP2(), ac=BUDGET, precision="fp8-gather", sample_input={"input_ids": ids, "labels": ids})


@on_ranks(2)
def test_parts_of_a_sequence_are_cast_as_the_whole(rank: int, world_size: int) -> None:
    """What a GPU gathers in float8 has the bits of a cast behind the gather (gloo gathers no float8)."""
    mesh, whole = init_device_mesh("cpu", (2,)), torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    linear = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False))
    float8_linears([linear], "fp8", "cuda")
    cast = cast_of(linear)
    assert cast is not None and rowwise_of(linear[0]) is not None
    part = cast(DTensor.from_local(whole.chunk(2, 1)[rank], mesh, [Shard(1)], run_check=False)).to_local()
    other = cast(whole)
    assert torch.equal(part._data.float(), other._data.chunk(2, 1)[rank].float()) and part._scale == other._scale
    float8_linears([emulated := torch.nn.Sequential(torch.nn.Linear(32, 16))], "fp8", "cpu")
    assert cast_of(emulated) is None and rowwise_of(emulated[0]) is None
