"""A mean cross entropy of a part of a batch, as that part's share of the mean over the whole batch.

A model divides its loss by the targets that it is called with. A micro-batch of a pipeline, or a rank's part of the
sequence, has some of them, so the sum over a part is divided by what counts in the whole.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_like.losses.rows import IGNORED

_NAMES = ("cross_entropy", "nll_loss")
_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_current: contextvars.ContextVar[LossCalls | None] = contextvars.ContextVar("nemo_like_loss_calls", default=None)


@dataclass(frozen=True)
class LossCall:
    """One call of a function of `_NAMES` with the numbers of classes as targets."""

    target: Tensor
    ignore_index: int
    weight: Tensor | None
    """Weights of the classes."""
    reduction: str

    def counted(self) -> Tensor:
        """Return the divisor of a mean: how many targets count, or the sum of their weights."""
        counts = self.target != self.ignore_index
        if self.weight is None:
            return counts.sum()
        return (self.weight[self.target.where(counts, 0)] * counts).sum()


def mean_of(total: Tensor, call: LossCall) -> Tensor:
    """The mean of which `total` is the sum: over the targets of `call`, or over those of the `LossCalls` around it."""
    calls = _current.get()
    return total / call.counted() if calls is None else calls.divided(total, call)


class LossCalls:
    """Within it, the cross entropies of a model are written down, and their means are over `divisor`."""

    def __init__(
        self, divisor: Callable[[int, Tensor], Tensor | float] | None = None, left_out: Collection[str] = ()
    ) -> None:
        """Begin with no call.

        Args:
            divisor: called with the number of a mean, counted from 0, and with what counts among its own targets. None: a
                mean is over its own targets, and `seen` has the calls.
            left_out: the reductions whose losses and gradients become zero.
        """
        self.seen: list[LossCall] = []
        self._divisor, self._left_out = divisor, left_out
        self._means, self._inside = 0, False
        self._before: dict[str, Any] = {}

    def __enter__(self) -> LossCalls:
        self._before = {name: getattr(F, name) for name in _NAMES}
        for name, function in self._before.items():
            setattr(F, name, self._watched(function))
        self._token = _current.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _current.reset(self._token)
        for name, function in self._before.items():
            setattr(F, name, function)

    def divided(self, total: Tensor, call: LossCall) -> Tensor:
        """As `mean_of`."""
        counted = call.counted()
        number, self._means = self._means, self._means + 1
        return total / (counted if self._divisor is None else self._divisor(number, counted))

    def _watched(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(*args: Any, **kwargs: Any) -> Tensor:
            arguments = dict(zip(_ARGUMENTS, args)) | kwargs
            target, reduction = arguments["target"], arguments.get("reduction", "mean")
            old_words = arguments.get("size_average") is not None or arguments.get("reduce") is not None
            # What answers for logits that do not exist calls the function again.
            if self._inside or old_words or target.is_floating_point():
                return function(*args, **kwargs)
            call = LossCall(target, arguments.get("ignore_index", IGNORED), arguments.get("weight"), reduction)
            if self._divisor is None:  # else nobody reads them, and a target would live as long as this
                self.seen.append(call)
            self._inside = True
            try:
                if reduction in self._left_out:
                    return function(**arguments | {"reduction": "sum"}) * 0
                if reduction != "mean" or self._divisor is None:
                    return function(*args, **kwargs)
                if arguments["input"].dtype == torch.float16:  # a sum over many tokens is past its largest number
                    arguments["input"] = arguments["input"].float()
                return self.divided(function(**arguments | {"reduction": "sum"}), call)
            finally:
                self._inside = False

        return watched
