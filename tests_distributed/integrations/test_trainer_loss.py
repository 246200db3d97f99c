"""`transformers.Trainer` with ``loss="chunked"`` on two ranks: the loss of every step is that of whole logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import decoders
from tests_distributed.spawn import run_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

STEPS = 50


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows with prompts of several lengths, which do not count: the mean is over the tokens of all ranks."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = decoders.batch(1, 16, seed=index % 4)[0]  # few, to be learnt by heart
        labels = ids.clone()
        labels[: index % 9] = -100
        return {"input_ids": ids, "labels": labels}


def _curves(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:

    from nemo_like.integrations.transformers import CheckpointingMixin
    from nemo_like.options import ChunkedLoss

    class Trainer(CheckpointingMixin, transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    curves: dict[str, list[float]] = {}
    for name, loss in (("plain", "model"), ("chunked", ChunkedLoss(chunk_tokens=8))):
        losses = curves[name] = []
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, max_steps=STEPS, learning_rate=3e-3, save_strategy="no",
            report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no", seed=5,
        )  # fmt: skip
        model = decoders.build("qwen3")
        trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), loss=loss)
        trainer.train()
        assert torch.distributed.get_world_size() == 2
    return curves


@pytest.mark.long
def test_fifty_steps_in_chunks_are_those_of_whole_logits(tmp_path: Path) -> None:
    first, second = run_ranks(2, _curves, str(tmp_path), init_group=False, timeout=240)
    for curves in (first, second):
        plain, chunked = (torch.tensor(curves[name]) for name in ("plain", "chunked"))
        assert len(plain) == STEPS and plain[-5:].mean() < plain[:5].mean() - 1
        torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=0)
    assert first["plain"] != second["plain"]
