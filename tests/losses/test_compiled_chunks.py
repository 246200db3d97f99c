"""Compiled chunks: one graph for all of them, and the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from nemo_like import ChunkedLoss, parallelize
from nemo_like.losses import chunked_cross_entropy, chunked_log_probs
from tests.losses.whole_logits import gradients
from tests.models import decoders


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _found(loss: Any, tokens: int, backend: str | None, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    head, hidden = nn.Linear(8, 50), torch.randn(tokens, 8, requires_grad=True)
    labels = torch.randint(50, (tokens,))
    labels[3] = -100
    value = loss(hidden, head, labels, options=ChunkedLoss(chunk_tokens=9, compile=backend), **options)
    return [value, *gradients(value.sum(), hidden, head)]


@pytest.mark.parametrize(
    ("loss", "options", "graphs"),
    [
        (chunked_cross_entropy, {}, 1),
        (chunked_cross_entropy, dict(label_smoothing=0.1, z_loss=0.1, logit_softcap=3.0, logit_scale=0.5), 1),
        (chunked_log_probs, {}, 2),  # losses alone in forward, with their gradient in backward
    ],
)
def test_every_chunk_runs_one_graph(loss: Any, options: dict[str, Any], graphs: int) -> None:
    for tokens in (40, 47, 90):  # the last chunk has 4, 2 and 9 tokens
        for ours, eager in zip(_found(loss, tokens, "aot_eager", **options), _found(loss, tokens, None, **options)):
            torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-7)
        assert _graphs() == graphs


def test_inductor() -> None:
    for ours, eager in zip(_found(chunked_cross_entropy, 40, "inductor"), _found(chunked_cross_entropy, 40, None)):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-7)
    assert _graphs() == 1


def test_layers_that_are_compiled_have_compiled_chunks() -> None:
    ids, counts = decoders.batch(2, 16), []
    for loss in ("model", ChunkedLoss(chunk_tokens=5)):
        torch._dynamo.reset()
        counters.clear()
        model = parallelize(decoders.build("qwen3"), "single", "none", loss=loss, compile="aot_eager", device="cpu")
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
        counts.append(_graphs())
    assert counts[1] == counts[0] + 1


def test_a_compiled_model_does_not_unroll_the_chunks() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return chunked_cross_entropy(self.embed(ids).tanh(), self.head, ids, shift=True, chunk_tokens=9)

    torch.manual_seed(0)
    model, ids = Model(), torch.randint(50, (2, 30))
    model(ids).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="aot_eager")(ids).backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected))
    assert _graphs() <= 2  # before the loss, and after it
