"""A batch larger than the one that a plan was made for: trained on all the same, and warned of once."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_like._util.log import warn_once
from nemo_like._util.tensors import describe, tensors_in
from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import Plan

_WHOLE = ("torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64")


def most_elements(tensors: Iterable[torch.Tensor]) -> int:
    """Return the elements of the largest tensor of whole numbers (token ids, labels), or where there is none, of the
    largest of all."""
    return _most([(str(t.dtype), t.numel()) for t in tensors])


def _most(sizes: list[tuple[str, int]]) -> int:
    whole = [size for dtype, size in sizes if dtype in _WHOLE]
    return max(whole or [size for _, size in sizes], default=0)


@dataclass(eq=False)
class SizeWatch:
    """Logs once that a batch is larger than the one that memory was planned for. Gradients do not depend on a plan."""

    planned: str  # Description of the planned batch, for people.
    most: int  # See `most_elements`.
    peak_bytes: int = 0  # Peak that was predicted; 0: only the caller knows.
    over: bool = False

    def __reduce__(self) -> Any:
        return SizeWatch, (self.planned, self.most, self.peak_bytes)

    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
            self.see((args, kwargs))

    def see(self, batch: object, microbatches: int = 1) -> None:
        """A batch that is trained on, as so many micro-batches of equally many rows."""
        if self.over:
            return
        tensors = tuple(tensors_in(batch))
        if most_elements(tensors) <= self.most * microbatches:
            return
        self.over = True  # the hook is not taken out here: torch goes through the hooks just now
        peak = f"the predicted peak of {write_bytes(self.peak_bytes)}" if self.peak_bytes else "was predicted"
        each = f" in each of {microbatches} micro-batches" if microbatches > 1 else ""
        warn_once(
            f"A batch is larger than the one that the plan was made for ({describe(tensors, {})}; planned: "
            f"{self.planned}{each}). It is trained on as it is, and takes more than {peak}. Plan for the "
            "largest batch: give it as sample_input=, or its length as --seq-len of nemo-like fit."
        )


def size_watch(plan: Plan | None, tokens: int | None) -> SizeWatch | None:
    """Return a watch for a batch that is larger than planned; None: the planned size is not known.

    Args:
        plan: made for a sample, whose largest tensor of whole numbers (token ids, labels) counts, or where it has none, the
            largest of all.
        tokens: elements of that tensor; `plan` is asked first.
    """
    sample = "" if plan is None else plan.step.get("sample", "")
    if plan is not None and sample and plan.peak_bytes:
        most = _most(_sizes(sample))
        return SizeWatch(sample, most, plan.peak_bytes) if most else None
    return None if tokens is None else SizeWatch(f"{tokens} tokens", tokens)


def _sizes(described: str) -> list[tuple[str, int]]:
    """(dtype, number of elements) of each tensor in the words of `describe`.

    >>> _sizes("int64 (2, 64), float32 (3,)")
    [('torch.int64', 128), ('torch.float32', 3)]
    """
    tensors = re.findall(r"(\w+) \(([\d, ]*)\)", described)
    return [(f"torch.{dtype}", math.prod(map(int, re.findall(r"\d+", shape)))) for dtype, shape in tensors]
