"""``precision="fp8"`` beside ``tp`` and ``ep`` on two gloo ranks (emulated on the CPU)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_like import parallelize
from nemo_like.options import TensorParallel
from tests.models.fit_models import llama, mixture
from tests_distributed.spawn import run_ranks

pytest.importorskip("torchao.float8")
pytest.importorskip("transformers")

Found = tuple[float, dict[str, torch.Tensor]]


def _step(model: Any, words: int) -> Found:
    ids = torch.randint(words, (2, 32), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


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
    for other in others:
        assert other[0] == plain[0] and all(torch.equal(other[1][name], grad) for name, grad in plain[1].items())
    assert plain[0] == pytest.approx(one[0], rel=1e-3)
    for name, grad in one[1].items():
        # Partial sums round otherwise, and a last bit moves a value by a step of float8, an eighth of it.
        assert (plain[1][name] - grad).norm() <= 0.125 * grad.norm(), name


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
    one, *split = run_ranks(2, _experts, timeout=150)[0]
    for other in split:
        assert other[0] == one[0] and all(torch.equal(other[1][name], grad) for name, grad in one[1].items())
