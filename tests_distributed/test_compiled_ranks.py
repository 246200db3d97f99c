"""Compiled layers on ranks that split weights or sequences, held against the plain model that one process trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from nemo_like import ContextParallel, TensorParallel, parallelize
from tests.checks import step
from tests.models.fit_models import llama
from tests_distributed.expert.whole_gradients import assert_close
from tests_distributed.spawn import on_ranks

IDS = torch.arange(32).view(2, 16)
AXES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "sequence parallel": {"tp": TensorParallel(2, sequence_parallel=True)},
    "cp": {"cp": 2},
    "ring": {"cp": ContextParallel(2, method="ring")},
    "ulysses": {"cp": ContextParallel(2, method="ulysses")},
}


def _llama(tied: bool) -> nn.Module:
    model = llama(layers=2)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    return model


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.few(2)  # 10 s a case: a tied one is the sibling of each
@on_ranks(2, timeout=180)
def test_gradients_of_compiled_layers_are_those_of_the_plain_model(
    rank: int, world_size: int, axis: str, tied: bool
) -> None:
    batch = {"input_ids": IDS, "labels": IDS}
    wanted = step(_llama(tied), **batch)
    for ac in ("none", "full", "selective"):
        torch.compiler.reset()
        counters.clear()
        model = parallelize(_llama(tied), ac=ac, compile="aot_eager", device="cpu", **AXES[axis])
        assert_close(step(model, **batch), wanted, where=(axis, ac))
        assert counters["aot_autograd"]["ok"], (axis, ac, "nothing was compiled")
        assert not counters["graph_break"], (axis, ac, counters["graph_break"])


class _Block(nn.Module):
    """Takes the hidden states inside of a dict, and fills a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, states: dict[str, Tensor], seen: list[Tensor]) -> dict[str, Tensor]:
        x = states["x"]
        seen.append(x)
        return {"x": x + self.down(torch.relu(self.up(self.norm(x))))}


class _InDicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(16, 8), nn.ModuleList(_Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        states, seen = {"x": self.embed(ids)}, list[Tensor]()
        for layer in self.layers:
            states = layer(states, seen)
        return F.mse_loss(states["x"], torch.ones(())) + sum(x.square().mean() for x in seen)


@on_ranks(2)
def test_a_collective_inside_of_a_container_has_its_gradient(rank: int, world_size: int) -> None:
    plan = {"embed": "embedding_rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
    ids = torch.arange(12).view(2, 6) % 16
    plain = _InDicts()
    plain(ids).backward()
    model = parallelize(_InDicts(), tp=TensorParallel(2, plan=plan), ac="none", compile="aot_eager", device="cpu")
    model(ids).backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    assert_close(found, {name: p.grad for name, p in plain.named_parameters()})  # type: ignore[misc]
