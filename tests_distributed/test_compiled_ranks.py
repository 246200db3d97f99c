"""Compiled layers on ranks that split weights or sequences, held against the plain model that one process trains."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from nemo_like import ContextParallel, TensorParallel, parallelize
from tests.checks import assert_near, gradients_of, step
from tests.models.families import FAMILIES
from tests.models.fit_models import llama
from tests.models.tiny import Block
from tests_distributed.context.cut_models import without_dropout
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


# Tracing takes 2 to 8 s. The two of the default run: the embedding without a gradient, and layers left to eager.
@pytest.mark.few(2)
@pytest.mark.parametrize("ac", ["none", "selective", "full"])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2, timeout=180)
def test_gradients_of_compiled_layers_are_those_of_the_plain_model(
    rank: int, world_size: int, ac: str, axis: str, tied: bool
) -> None:
    batch = {"input_ids": IDS, "labels": IDS}
    wanted = step(_llama(tied), **batch)
    torch.compiler.reset()
    counters.clear()
    model = parallelize(_llama(tied), ac=ac, compile="aot_eager", device="cpu", **AXES[axis])
    assert_near(step(model, **batch), wanted, where=(axis, ac), least=1e-8)
    assert counters["aot_autograd"]["ok"], (axis, ac, "nothing was compiled")
    assert not counters["graph_break"], (axis, ac, counters["graph_break"])


@on_ranks(2)
def test_dropout_in_a_checkpointed_layer_that_tp_splits_is_refused(rank: int, world_size: int) -> None:
    """AOTAutograd of torch 2.13 takes the mesh for a saved tensor there; on a CPU, with an assertion without a way out."""
    model = _llama(tied=False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.attention_dropout = 0.1
    parallelize(model, ac="selective", compile="aot_eager", tp=2, device="cpu")
    with pytest.raises(RuntimeError, match=r"cannot compile a layer whose weights tp splits and that .* ac='full'"):
        model(input_ids=IDS, labels=IDS)


# Tracing takes 6 to 11 s.
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "ac", "axis"),
    [
        ("gemma3_text", "selective", "tp"),
        ("qwen3_moe", "selective", "sequence parallel"),
        ("qwen3_moe", "selective", "tp"),
        ("qwen3_moe", "none", "sequence parallel"),
    ],
)
@on_ranks(2, timeout=180)
def test_layers_of_other_models_are_one_graph(rank: int, world_size: int, kind: str, ac: str, axis: str) -> None:
    """Experts get a view of gathered sequences; the norm of Gemma calls a method of its own."""
    family = FAMILIES[kind]
    models = [without_dropout(family.build(0)), without_dropout(family.build(0))]
    family.step(models[0]).backward()
    torch.compiler.reset()
    counters.clear()
    models[1] = parallelize(models[1], ac=ac, compile="aot_eager", device="cpu", **AXES[axis])
    family.step(models[1]).backward()
    assert_near(gradients_of(models[1]), gradients_of(models[0]), where=(kind, ac), least=1e-8)
    assert not counters["graph_break"], counters["graph_break"]


class _Block(Block):
    """Takes the hidden states inside of a dict, and fills a list."""

    def forward(self, states: dict[str, Tensor], seen: list[Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        seen.append(states["x"])
        return {"x": super().forward(states["x"])}


class _InDicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(16, 8), nn.ModuleList(_Block(8) for _ in range(2))

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
    assert_near(gradients_of(model), gradients_of(plain), least=1e-8)
