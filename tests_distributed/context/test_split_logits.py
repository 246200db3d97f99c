"""``cp`` beside a loss that stays split by vocabulary: four ranks against one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor.parallel import loss_parallel

from nemo_like import parallelize
from nemo_like.options import TensorParallel
from tests.models.fit_models import llama
from tests_distributed.spawn import run_ranks

pytest.importorskip("transformers")


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _gradients(rank: int, world_size: int) -> tuple[float, dict[str, torch.Tensor]]:
    tp = TensorParallel(2, sequence_parallel=True, loss_parallel=True)
    model = parallelize(llama(2), ac="full", tp=tp, cp=2, device="cpu")
    with loss_parallel():
        loss = model(**_batch()).loss
        loss.backward()
    return loss.item(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.few(1)
def test_the_loss_of_split_logits_is_summed_over_parts_of_sequences() -> None:
    one = llama(2)
    loss = one(**_batch()).loss
    loss.backward()
    found, gradients = run_ranks(4, _gradients, timeout=150)[0]
    assert found == pytest.approx(loss.item(), rel=1e-6)
    for name, p in one.named_parameters():
        # Relative to the gradient's norm: sums over ranks round differently from one sum.
        assert (gradients[name] - p.grad).norm() <= 1e-5 * p.grad.norm(), name
