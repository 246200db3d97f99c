"""How the training loop goes through a step: what a memory budget has to know besides the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from nemo_like._util.words import check_bool, check_whole, did_you_mean, normalise
from nemo_like.options.optimizers import OPTIMIZER_OBJECTS

OPTIMIZERS: tuple[str, ...] = tuple(OPTIMIZER_OBJECTS)
ZERO_GRAD: tuple[str, ...] = ("free", "zero")
SYNC: tuple[str, ...] = ("every", "last")


@dataclass(frozen=True)
class StepSpec:
    """One step of the training loop, between two updates of the weights. The defaults are those of

    ::

        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    >>> StepSpec(microbatches=4, keeps_output=False).accumulates
    True

    Clipping gradients in place takes no memory, so nothing has to be said of it.

    Raises:
        ValueError: an unknown word or a number out of range. TypeError: a value of the wrong kind.
    """

    microbatches: int = 1
    """Forward and backward passes before the optimizer's step; gradients are there from the first one on."""
    sync: str = "every"
    """Which microbatches reduce gradients over the ranks: ``every`` one (what a plain loop does), or the ``last``
    (`nemo_like.distributed.gradients.set_gradient_sync`, DDP's ``no_sync``): each rank holds whole gradients till then."""
    keeps_output: bool = True
    """What the model returned (logits!) stays alive through backward, and until the next forward has returned, as
    where it has a name. False: the loop drops it before backward (``loss = model(**batch).loss``)."""
    zero_grad: str = "free"
    """``free``: gradients are None before the first forward of a step (torch's default); ``zero``: they stay, as
    zeros (``zero_grad(set_to_none=False)``)."""
    optimizer: str = "adamw"
    """The optimizer's state and the temporaries of its step: ``adamw`` (as torch builds it: with ``foreach`` on CUDA, else
    one parameter at a time), ``adamw-loop``, ``adamw-foreach``, ``adamw-fused``, ``adamw-8bit`` (states in blocks of 256),
    ``adamw-bf16`` (states in two bytes), ``muon`` (the matrices of layers; AdamW for all else), ``sgd``,
    ``sgd-momentum``."""
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    """The loss of what the model returned, where the loop computes it. It is called on tensors without values on the
    CPU; labels in it count by shape. None: the output's own ``loss``, or, where there is none, a cross entropy in
    float32 of its first tensor that has a gradient, shifted by one token."""
    ema: bool = False
    """The loop keeps an average of the parameters, sharded as they are (`torch.optim.swa_utils.AveragedModel`)."""

    def __post_init__(self) -> None:
        check_whole("StepSpec.microbatches", self.microbatches, 1)
        for name, known in (("sync", SYNC), ("zero_grad", ZERO_GRAD)):
            _word(f"StepSpec.{name}", getattr(self, name), known)
        for name in ("keeps_output", "ema"):
            check_bool(f"StepSpec.{name}", getattr(self, name))
        _word("optimizer", self.optimizer, OPTIMIZERS)
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise TypeError(
                f"StepSpec.loss_fn is {self.loss_fn!r}; it must be a function of the model's output, or None."
            )

    @classmethod
    def of(cls, step: StepSpec | None, optimizer: str | None = None) -> StepSpec:
        """What ``step=`` and ``optimizer=`` mean together; None: the defaults.

        Raises:
            TypeError: `step` is something else. ValueError: both name an optimizer, and not the same.
        """
        if step is not None and not isinstance(step, StepSpec):
            raise TypeError(f"step is {step!r}; it must be a StepSpec(...), or None for its defaults.")
        if optimizer is None:
            return cls() if step is None else step
        if step is not None and step.optimizer not in (cls.optimizer, optimizer):
            raise ValueError(f"optimizer is {optimizer!r} and step has {step.optimizer!r}; say it once.")
        return replace(cls() if step is None else step, optimizer=optimizer)

    @property
    def accumulates(self) -> bool:
        """Whether a backward of the step adds to gradients that are there."""
        return self.microbatches > 1 or self.zero_grad == "zero"

    @property
    def changed(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


def _word(name: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        close = did_you_mean(normalise(value), known) if isinstance(value, str) else ""
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}.{close}")
