"""The loss of next-byte prediction, on held-out text and over the steps of a run."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.data import Corpus, held_out_windows, unigram_entropy


class DivergedError(RuntimeError):
    """The loss or the gradient is no longer finite."""


def check_own_loss(model: nn.Module) -> None:
    """Raise ValueError unless `model` can be asked for its own loss, which is the one that is computed in chunks."""
    kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
    # transformers' loss of causal models takes targets that are shifted already; another might shift them once more.
    if getattr(model, "loss_type", None) != "ForCausalLM" or inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ValueError(
            f"--loss is 'chunked', and {type(model).__name__} is no causal language model of transformers, which computes "
            "its loss from shifted labels. Use --loss model."
        )


def own_next_byte_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The mean of `next_byte_loss` as the model computes it: in chunks, where `parallelize` was told so."""
    target = tokens[:, 1:].contiguous()
    return model(tokens[:, :-1], labels=target, shift_labels=target).loss


def next_byte_loss(model: nn.Module, tokens: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy of each byte after the first, nats; tokens: (B, T + 1) int64.

    The model may return logits, (B, T, V), or an object that has them as ``.logits``.
    """
    return _cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction)


def _cross_entropy(output: Any, target: torch.Tensor, reduction: str) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction=reduction)


def planned_loss(output: Any) -> torch.Tensor:
    """The loss of `next_byte_loss` for what the model returned, with targets of the right shape: what a budget counts."""
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

    def __init__(self, corpus: Corpus, seq_len: int, samples: int):
        self._corpus = corpus
        self._seq_len = seq_len
        self._starts = held_out_windows(corpus, seq_len, samples)

    def entropy(self) -> float:
        """Byte-unigram entropy of what is to be predicted, nats: a model that ignores context gets no lower loss."""
        return unigram_entropy(self._read(self._starts)[:, 1:])

    def loss(self, model: nn.Module, ranks: Ranks, size: int) -> float:
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
                losses = next_byte_loss(model, self._read(padded).to(ranks.device), reduction="none")
                total += losses.view(size, -1)[: len(starts)].double().sum().cpu()
        model.train()
        return float(ranks.sum(total)) / (len(self._starts) * self._seq_len * ranks.tp)

    def _read(self, starts: list[int]) -> torch.Tensor:
        return torch.stack([self._corpus.read(start, self._seq_len + 1) for start in starts])  # (samples, T + 1)
