"""The cross entropy of logits that are cut by vocabulary, as torch computes it within ``loss_parallel()``.

On one rank's part of the logits, with sums of which nothing is sent: what it allocates is that of
``torch/distributed/tensor/parallel/loss.py`` (PyTorch 2.13), which puts softmax and loss together from plain operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nemo_like.planning.planned_collectives import summed


class VocabularyParallelLoss(TorchFunctionMode):
    """Within it, `torch.nn.functional.cross_entropy` takes one rank's part of the logits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.cross_entropy:
            return func(*args, **(kwargs or {}))
        return self._cross_entropy(*args, **(kwargs or {}))

    def _cross_entropy(self, input: Tensor, target: Tensor, *_: Any, ignore_index: int = -100, **more: Any) -> Tensor:
        reduction = more.get("reduction", "mean")
        # Code that knows the whole vocabulary has put the parts of several tokens into one row.
        loss = _PlannedCrossEntropy.apply(input.reshape(target.numel(), -1), target.flatten(), ignore_index)
        return loss if reduction == "none" else getattr(loss, reduction)()


class _PlannedCrossEntropy(torch.autograd.Function):
    """(N, V / ranks) and (N,) to (N,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignored: int) -> Tensor:
        made = _log_softmax(logits)
        ctx.save_for_backward(made, target)
        ctx.ignored = ignored
        safe = torch.where(target != ignored, target, 0).unsqueeze(1)
        found = summed(torch.gather(made, 1, safe)).squeeze(1)
        return torch.where(target != ignored, -found, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        made, target = ctx.saved_tensors
        found = torch.zeros_like(made)
        scale = torch.where(target != ctx.ignored, grad, 0).unsqueeze(1)
        return (found + torch.exp(made)) * scale, None, None


def _log_softmax(logits: Tensor) -> Tensor:
    x = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    x = x.contiguous()
    shifted = x - summed(torch.amax(x, 1, keepdim=True))
    total = torch.log(summed(torch.sum(torch.exp(shifted), 1, keepdim=True)))
    return (shifted - total).to(logits.dtype)
