"""The number that a loop runs backward from, where the model does not say it itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nemo_like._util.tensors import tensors_in
from nemo_like.fake.reasons import in_a_line, without_values


def loss_of(output: Any, loss_fn: Callable[[Any], torch.Tensor] | None = None) -> torch.Tensor:
    """The number to run backward from: ``loss_fn(output)``, else a ``loss`` in the output, else a cross entropy.

    That is of its first tensor that has a gradient: in float32, shifted by one token, as most loops outside of a model
    compute it, and no less than others hold.
    """
    if loss_fn is not None:
        return _told_loss(output, loss_fn)
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        return output
    first = next((t for t in tensors_in(output) if t.requires_grad), None)
    if first is None:
        raise ValueError("The model's output has no loss and no tensor with a gradient; give StepSpec(loss_fn=...).")
    if first.dim() < 2:
        return first.float().sum()
    scores = (first[:, :-1] if first.dim() > 2 and first.shape[1] > 1 else first).float()
    labels = torch.zeros(scores.shape[:-1].numel(), dtype=torch.long, device=scores.device)
    return nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels)


def _told_loss(output: Any, loss_fn: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    with without_values(
        "StepSpec.loss_fn cannot be planned for: it",
        otherwise=lambda error: (
            f"StepSpec.loss_fn failed on what the model returns ({type(output).__name__}, without values, on the CPU): "
            f"{in_a_line(error)}. It is called with the output alone; labels it uses must be on the CPU."
        ),
    ):
        loss = loss_fn(output)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.requires_grad:
        raise ValueError(f"StepSpec.loss_fn returned {loss!r}; it must return one number that has a gradient.")
    return loss
