"""The loss of predicting the next token: of a batch, on held-out text, and over the steps of a run."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like.distributed import shard_sequence
from nemo_like.distributed.document_numbers import since_start
from nemo_like.distributed.pipeline import Pipeline
from nemo_like.losses.model_loss import chunked_in_evaluation
from nemo_like.losses.rows import IGNORED, predicts_next_token
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.data import Corpus, held_out_windows, unigram_entropy


class DivergedError(RuntimeError):
    """The loss or the gradient is no longer finite."""


def check_own_loss(model: nn.Module) -> None:
    """Raise ValueError unless `model` can be asked for its own loss, which is the one that is computed in chunks."""
    kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
    # Another loss might shift targets that are shifted already once more.
    if not predicts_next_token(model) or inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ValueError(
            f"--loss is 'chunked', and {type(model).__name__} is not a causal language model of transformers, which "
            "computes its loss from shifted labels. Use --loss model."
        )


@dataclass(frozen=True)
class Batch:
    """The inputs that a model is called with, and what it is to predict."""

    inputs: torch.Tensor
    """(B, T) int64."""
    targets: torch.Tensor
    """(B, T) int64: what follows each input; -100 where it does not count."""
    positions: torch.Tensor | None = None
    """(B, T) int64, restarting at each document of a packed row; None: every row is one."""

    @property
    def extra(self) -> dict[str, torch.Tensor]:
        """Return what the model is given in addition to its inputs."""
        return {} if self.positions is None else {"position_ids": self.positions}

    def to(self, device: torch.device) -> Batch:
        """The same on `device`."""
        positions = None if self.positions is None else self.positions.to(device)
        return Batch(self.inputs.to(device), self.targets.to(device), positions)


@dataclass(frozen=True)
class MeanLoss:
    """The mean cross entropy of a batch's targets, on this rank's part of the sequence, if they are cut."""

    own: bool = False
    """As the model computes it: in chunks, where `parallelize` was told so."""
    mesh: DeviceMesh | None = None
    """With a ``cp`` axis, where sequences are cut: the model then returns logits of a part."""

    def __call__(self, model: nn.Module, batch: Batch, counted: float | None = None) -> torch.Tensor:
        """Nats per token; its mean over the ranks is the loss of the batch.

        counted: targets that count in this micro-batch of one rank, where they are not all: the average over micro-batches
        and ranks, so that every target of the step weighs the same.
        """
        target = batch.targets
        if self.own:
            extra: dict[str, Any] = dict(batch.extra)
            if counted is not None:
                extra["num_items_in_batch"] = torch.tensor(counted, device=target.device)
            loss: torch.Tensor = model(batch.inputs, labels=target, shift_labels=target, **extra).loss
            return loss
        output = model(batch.inputs, **batch.extra)
        if self.mesh is None and counted is None:
            return _cross_entropy(output, target, "mean")
        counted = target.numel() if counted is None else counted
        return _cross_entropy(output, self._part(target), "sum") * self._ranks / counted

    def each(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of every target of this rank's part, (B, T / ranks); 0 where it does not count. In
        evaluation."""
        losses = _cross_entropy(model(batch.inputs, **batch.extra), self._part(batch.targets), "none")
        return losses.view(len(batch.inputs), -1)

    def total(self, model: nn.Module, batch: Batch, rows: int | None = None) -> torch.Tensor:
        """The sum over the targets of this rank's part, 0-dim float64, nats. In evaluation; every rank calls the model.

        In chunks where training has them, so that whole logits are never there.

        rows: how many rows count, from the first. Default: all.
        """
        rows = len(batch.inputs) if rows is None else rows
        if not self.own:
            return self.each(model, batch)[:rows].double().sum()
        target = batch.targets.clone()
        target[rows:] = IGNORED
        counted = int((target != IGNORED).sum())
        with chunked_in_evaluation(model):
            loss = self(model, replace(batch, targets=target) if counted else batch, counted or None)
        return loss.double() * counted / self._ranks if counted else torch.zeros_like(loss, dtype=torch.float64)

    @property
    def _ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh["cp"].size()

    def _part(self, target: torch.Tensor) -> torch.Tensor:
        return target if self.mesh is None else shard_sequence({"labels": target}, self.mesh)["labels"]


def check_piped(model: nn.Module) -> None:
    """Raise ValueError unless the last stage of a pipeline of `model` can compute the loss."""
    if not predicts_next_token(model):
        raise ValueError(
            f"--pp: {type(model).__name__} is not a causal language model of transformers, which computes its loss in "
            "the last stage. Train without --pp."
        )


def piped_batch(tokens: torch.Tensor, rows: int | None = None) -> dict[str, torch.Tensor]:
    """Return what a pipeline is called with to predict each byte after the first; `rows`: how many rows count, from the
    first."""
    target = tokens[:, 1:].contiguous()
    if rows is not None:
        target[rows:] = IGNORED
    return {"input_ids": tokens[:, :-1], "labels": target, "shift_labels": target}


def next_byte(tokens: torch.Tensor, documents: torch.Tensor | None = None) -> Batch:
    """Predict each byte after the first; tokens, documents: (B, T + 1) int64. A document's first byte does not count."""
    target = tokens[:, 1:].contiguous()
    if documents is None:
        return Batch(tokens[:, :-1], target)
    starts = documents[:, 1:] != documents[:, :-1]
    first = torch.ones_like(starts[:, :1])
    positions = since_start(torch.cat([first, starts[:, :-1]], 1))
    return Batch(tokens[:, :-1], target.masked_fill(starts, IGNORED), positions)


def count_targets(documents: torch.Tensor) -> int:
    """Targets that count of samples whose bytes are of these documents, (B, T + 1)."""
    return int((documents[:, 1:] == documents[:, :-1]).sum())


def document_lengths(documents: torch.Tensor) -> list[int]:
    """Tokens that the model reads of each document in samples whose bytes are of these, (B, T + 1)."""
    runs = (row.unique_consecutive(return_counts=True)[1].tolist() for row in documents[:, :-1])
    return [length for row in runs for length in row]


def _cross_entropy(output: Any, target: torch.Tensor, reduction: str) -> torch.Tensor:
    """The model may return logits, (B, T, V), or an object that has them as ``.logits``."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction=reduction)


def planned_loss(output: Any) -> torch.Tensor:
    """The loss of `MeanLoss` for what the model returned, with targets of the right shape: what a budget counts."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return _cross_entropy(output, torch.zeros(logits.shape[:-1], dtype=torch.long), "mean")


class LossLog:
    """The mean loss over all ranks of every step. Losses stay on the device until they are read."""

    def __init__(self, ranks: Ranks, first_step: int):
        self.losses: list[float] = []
        """Nats per token, one per step, from the step numbered `first_step` on."""
        self.first_step = first_step
        self._ranks = ranks
        self._unread: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """One step's mean loss on this rank's samples and gradient norm, 0-dim; does not wait for the device."""
        self._unread.append(torch.stack([loss, norm.to(loss.device)]))

    def read(self) -> None:
        """Bring what was added from the device and take the mean over ranks. A collective.

        Raises:
            DivergedError: a loss or norm is infinite or NaN; on every rank.
        """
        if not self._unread:
            return
        unread, self._unread = torch.stack(self._unread).double(), []  # (steps, 2)
        for loss, norm in (self._ranks.sum(unread) / self._ranks.world_size).tolist():
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise DivergedError(
                    f"Step {self.first_step + len(self.losses) + 1}: the loss is {loss}, the gradient's norm {norm}. "
                    "Lower --lr, lengthen --warmup-steps or clip more; checkpoints from before are untouched."
                )
            self.losses.append(loss)


class HeldOut:
    """A fixed choice of held-out samples, the same for every run and number of ranks.

    Raises:
        ValueError: the text is shorter than one sample.
    """

    def __init__(self, corpus: Corpus, seq_len: int, samples: int, pack: bool = False):
        self._corpus, self._pack = corpus, pack
        self._seq_len = seq_len
        self._starts = held_out_windows(corpus, seq_len, samples)

    def entropy(self) -> float:
        """Byte-unigram entropy of what is to be predicted, nats: a model that ignores context gets no lower loss."""
        return unigram_entropy(self._read(self._starts)[:, 1:])

    def loss(self, model: nn.Module | Pipeline, ranks: Ranks, size: int, mean: MeanLoss) -> float:
        """Mean loss over all samples, nats per byte, `size` samples at a time on each rank. A collective."""
        rounds = math.ceil(len(self._starts) / (size * ranks.data_ranks))
        total = torch.zeros((), dtype=torch.float64)
        model.eval()
        with torch.no_grad():
            for turn in range(rounds):
                first = (turn * ranks.data_ranks + ranks.data_rank) * size
                starts = self._starts[first : first + size]
                # A rank without samples left runs the forward too (FSDP2's ranks gather together) and counts nothing.
                padded = starts + self._starts[:1] * (size - len(starts))
                if isinstance(model, Pipeline):
                    piped = model.eval_step(**piped_batch(self._read(padded).to(ranks.device), len(starts)))
                    total += (
                        piped.double().cpu() * len(starts) * self._seq_len / ranks.cp
                    )  # each of a group has it whole
                    continue
                documents = self._documents(padded).to(ranks.device) if self._pack else None
                total += mean.total(model, next_byte(self._read(padded).to(ranks.device), documents), len(starts)).cpu()
        model.train()
        counted = count_targets(self._documents(self._starts)) if self._pack else len(self._starts) * self._seq_len
        return float(ranks.sum(total)) / (counted * ranks.tp * ranks.pp)

    def _documents(self, starts: list[int]) -> torch.Tensor:
        return torch.stack([self._corpus.documents(start, self._seq_len + 1) for start in starts])  # (samples, T + 1)

    def _read(self, starts: list[int]) -> torch.Tensor:
        return torch.stack([self._corpus.read(start, self._seq_len + 1) for start in starts])  # (samples, T + 1)
