"""A batch larger than the one that a plan was made for: trained on all the same, and said once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from nemo_like.log import warn_once
from nemo_like.planning.plan import Plan, gib
from nemo_like.tensors import describe, tensors_in

_WHOLE = ("torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64")


def warn_of_larger_batches(model: nn.Module, plan: Plan) -> None:
    """Warn once, on rank zero, when `model` trains on more than the sample that `plan` was made for.

    What is compared is the largest tensor of whole numbers (token ids, labels), or where the sample has none, the largest
    of all. Nothing else changes: gradients do not depend on a plan.
    """
    planned = plan.step.get("sample", "")
    if planned and plan.peak_bytes:
        watch = _SizeWatch(planned, plan.peak_bytes)
        watch.handle = model.register_forward_pre_hook(watch, with_kwargs=True)


@dataclass(eq=False)
class _SizeWatch:
    planned: str
    """`describe` of the sample's tensors."""
    peak_bytes: int
    handle: RemovableHandle | None = field(default=None, repr=False)
    over: bool = False

    def __post_init__(self) -> None:
        sizes = _sizes(self.planned)
        self.whole = any(dtype in _WHOLE for dtype, _ in sizes)
        self.most = max((size for dtype, size in sizes if not self.whole or dtype in _WHOLE), default=0)

    def __deepcopy__(self, memo: Any) -> _SizeWatch:
        return _SizeWatch(self.planned, self.peak_bytes, over=self.over)

    def __reduce__(self) -> Any:
        return _SizeWatch, (self.planned, self.peak_bytes)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.over or torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        given = tuple(tensors_in((args, kwargs)))
        found = max((t.numel() for t in given if not self.whole or str(t.dtype) in _WHOLE), default=0)
        if found <= self.most or not self.most:
            return
        self.over = True  # not taken out here: torch goes through the hooks just now
        warn_once(
            f"A batch is larger than the one that the plan was made for ({describe(given, {})}; planned: {self.planned}). "
            f"It is trained on as it is, and takes more than the predicted peak of {gib(self.peak_bytes)}. Plan for the "
            "largest batch: give it as sample_input=, or its length as --max-seq-len of nemo-like fit."
        )


def _sizes(described: str) -> list[tuple[str, int]]:
    """(dtype, number of elements) of each tensor in the words of `describe`.

    >>> _sizes("int64 (2, 64), float32 (3,)")
    [('torch.int64', 128), ('torch.float32', 3)]
    """
    found = []
    for dtype, shape in re.findall(r"(\w+) \(([\d, ]*)\)", described):
        size = 1
        for length in filter(None, (part.strip() for part in shape.split(","))):
            size *= int(length)
        found.append((f"torch.{dtype}", size))
    return found
