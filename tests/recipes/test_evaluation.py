"""What an evaluation between training steps takes: with a chunked loss the logits of a microbatch are never whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_like import parallelize
from nemo_like.losses.model_loss import loss_hooks
from nemo_like.losses.rows import IGNORED
from nemo_like.options import ChunkedLoss
from nemo_like.recipes.loss import MeanLoss
from nemo_like.recipes.rows import Batch

transformers = pytest.importorskip("transformers")

ROWS, TOKENS, VOCABULARY, CHUNK = 4, 32, 2048, 32


class _Largest(TorchDispatchMode):
    """The most bytes of a tensor that an operator returned."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        self.most = max([self.most, *sizes])
        return made


def _model(loss: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    return parallelize(transformers.LlamaForCausalLM(config).train(), ac="full", loss=loss, device="cpu")


def _batch(rows: int | None = None) -> Batch:
    """rows: how many count, from the first; None: all."""
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    target = ids[:, 1:].clone()
    target[0, :5] = IGNORED
    if rows is not None:
        target[rows:] = IGNORED
    return Batch(ids[:, :-1], target)


def _evaluated(loss: Any, rows: int | None = None) -> tuple[torch.Tensor, int]:
    model = _model(loss).eval()
    with torch.no_grad(), _Largest() as largest:
        total = MeanLoss(own=loss != "model").total(model, _batch(rows))
    assert not model.training
    return total, largest.most


@pytest.mark.parametrize("rows", [None, 2, 0])
def test_the_sum_of_a_chunked_loss_is_that_of_whole_logits_and_no_more_than_a_chunk_is_there(rows: int | None) -> None:
    whole, all_logits = _evaluated("model", rows)
    chunked, largest = _evaluated(ChunkedLoss(chunk_tokens=CHUNK), rows)
    assert whole.dtype == chunked.dtype == torch.float64
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=0)
    assert (rows == 0) == (float(whole) == 0)
    assert all_logits == ROWS * TOKENS * VOCABULARY * 4
    assert largest == CHUNK * VOCABULARY * 4 == all_logits // 4


def test_the_last_stage_of_a_pipeline_evaluates_in_chunks() -> None:
    model, batch = _model("model").eval(), _batch()
    hooks = loss_hooks(model, ChunkedLoss(chunk_tokens=CHUNK))  # which a stage calls around its forward
    asked = {"input_ids": batch.inputs, "labels": batch.targets, "shift_labels": batch.targets}
    with torch.no_grad(), _Largest() as largest:
        hooks.before(model, (), asked)
        output = model(**asked)
        output = hooks.after(model, (), output)
    assert output.logits is None and largest.most == CHUNK * VOCABULARY * 4
    with torch.no_grad():
        torch.testing.assert_close(output.loss, model(**asked).loss, rtol=1e-6, atol=0)


def test_outside_of_an_evaluation_a_model_in_evaluation_mode_returns_logits() -> None:
    model, batch = _model("chunked").eval(), _batch()
    with torch.no_grad():
        MeanLoss(own=True).total(model, batch)
        output = model(batch.inputs, labels=batch.targets, shift_labels=batch.targets)
    assert output.logits.shape == (ROWS, TOKENS, VOCABULARY)
