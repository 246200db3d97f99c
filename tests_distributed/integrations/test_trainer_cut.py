"""`transformers.Trainer` with ``cp=2`` on two ranks: the losses of one rank with whole sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models import decoders
from tests_distributed.spawn import run_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

STEPS = 12


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of 15 tokens with prompts of several lengths, which do not count."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = decoders.batch(1, 15, seed=index % 4)[0]
        labels = ids.clone()
        labels[: index % 9] = -100
        return {"input_ids": ids, "labels": labels}


def _curve(rank: int, world_size: int, folder: str, cp: int, loss: str) -> list[float]:

    from nemo_like.integrations.transformers import CheckpointingMixin

    class Trainer(CheckpointingMixin, transformers.Trainer):
        pass

    arguments = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS,
        learning_rate=3e-3, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, seed=5,
    )  # fmt: skip
    trainer = Trainer(
        model=decoders.build("qwen3"), args=arguments, train_dataset=Rows(), eval_dataset=Rows(), ac="selective", cp=cp,
        loss=loss,
    )  # fmt: skip
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*found, trainer.evaluate()["eval_loss"]]


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", ["model", "chunked"])
def test_losses_are_those_of_whole_sequences(tmp_path: Path, loss: str) -> None:
    (whole,) = run_ranks(1, _curve, str(tmp_path), 1, loss, init_group=False, timeout=120)
    assert len(whole) == STEPS + 1 and whole[-2] < whole[0] - 0.5
    for found in run_ranks(2, _curve, str(tmp_path), 2, loss, init_group=False, timeout=120):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(whole), rtol=1e-4, atol=0)
