"""The loss of predicting the next token: of a batch, on held-out windows, and as a plan counts it."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like.distributed import shard_sequence
from nemo_like.distributed.pipeline import Pipeline
from nemo_like.distributed.ranks import Ranks
from nemo_like.losses.model_loss import chunked_in_evaluation
from nemo_like.losses.rows import predicts_next_token
from nemo_like.recipes.data import Batch, HeldOutText


def check_own_loss(model: nn.Module, wish: str, way_out: str) -> None:
    """Raise ValueError unless `model` can be asked for its own loss, which `wish` needs."""
    kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
    # Another loss might shift targets that are shifted already once more.
    if not predicts_next_token(model) or inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ValueError(
            f"{wish}, and {type(model).__name__} is not a causal language model of transformers, which computes its loss "
            f"from shifted labels. {way_out}"
        )


@dataclass(frozen=True)
class MeanLoss:
    """The mean cross entropy of a batch's targets, on this rank's part of the sequence, if they are cut."""

    chunked: bool = False  # As the model computes it: in chunks, where `parallelize` was told so.
    # With a ``cp`` axis, where sequences are cut: the model then returns logits of a part.
    mesh: DeviceMesh | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Nats per token; its mean over the ranks is the loss of the batch."""
        target = batch.targets
        if self.chunked:
            loss: torch.Tensor = model(batch.inputs, labels=target, shift_labels=target).loss
            return loss
        output = model(batch.inputs)
        if self.mesh is None:
            return _cross_entropy(output, target, "mean")
        return _cross_entropy(output, self._part(target), "sum") * self._ranks / target.numel()

    def total(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The sum over the targets of this rank's part, 0-dim float64, nats. In evaluation; every rank calls the model.

        In chunks where training has them, so that whole logits are never there.
        """
        if not self.chunked:
            return _cross_entropy(model(batch.inputs), self._part(batch.targets), "none").double().sum()
        with chunked_in_evaluation(model):
            return self(model, batch).double() * batch.targets.numel() / self._ranks

    @property
    def _ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh["cp"].size()

    def _part(self, target: torch.Tensor) -> torch.Tensor:
        return target if self.mesh is None else shard_sequence({"labels": target}, self.mesh)["labels"]


def evaluate(model: nn.Module | Pipeline, rows: HeldOutText, ranks: Ranks, size: int, mean: MeanLoss) -> float:
    """Mean loss over all `rows`, nats per token, `size` rows at a time on each rank. A collective."""
    total = torch.zeros((), dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for first in range(0, len(rows.starts), size * ranks.data_ranks):
            begin = first + ranks.data_rank * size
            numbers = range(begin, min(begin + size, len(rows.starts)))
            # A rank without rows left runs the forward too (FSDP2's ranks gather together) and counts nothing.
            batch = rows.batch(numbers or [0]).to(ranks.device)
            if isinstance(model, Pipeline):  # each of a group has it whole
                loss = model.eval_step(**batch.with_labels()).double() * batch.targets.numel() / ranks.cp
            else:
                loss = mean.total(model, batch)
            if numbers:
                total += loss.cpu()
    model.train()
    return float(ranks.sum(total)) / (rows.targets * ranks.tp * ranks.pp)


def _cross_entropy(output: Any, target: torch.Tensor, reduction: str) -> torch.Tensor:
    """The model may return logits, (B, T, V), or an object that has them as ``.logits``."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction=reduction)


def planned_loss(output: Any) -> torch.Tensor:
    """Return the loss of `MeanLoss` for the model's output, with targets of the right shape, as a budget counts it."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return _cross_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.long), "mean")
