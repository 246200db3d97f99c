"""How the queries of a rank meet the keys of the others: one object for each word of `ContextParallel.method`.

The object of a word is ``METHOD`` of the file in this folder that is called as the word. The operators that it sends with
say for themselves what plans count for them (`sequence_ops`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from nemo_like.distributed.context_parallel.parts import Parts, StackCall
    from nemo_like.distributed.context_parallel.stacks import CutStack


class ContextMethod(ABC):
    """What one method asks of a model, and what it does in place of attention. It has no state.

    Queries, keys and values are those of a part of the sequence, (B, H, L, D).
    """

    planned = True
    """Runs on fake tensors without other ranks, so that budgets and dry runs count it."""
    takes_masks = True
    """Attention may have a mask; else a caller's mask that hides nothing is taken for none."""
    cuts_heads = False
    """Attention runs on some heads of the whole sequence, and masks have all rows; else on all heads of this rank's rows."""
    triangles = False
    """Causal attention without a mask runs on each chunk of queries by itself, over `Parts.triangle`."""

    def check(self, stack: CutStack, ranks: int) -> None:  # noqa: B027
        """Raise ValueError where the layers of `stack`, which is of transformers, cannot have this attention."""

    @abstractmethod
    def attend(
        self, parts: Parts, implementation: str, own: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor,
        value: Tensor, mask: Tensor | None, kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """Return what `own`, the attention of transformers called `implementation`, does: (B, L, H, D), and weights."""

    @abstractmethod
    def attend_plain(
        self, parts: Parts, own: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        causal: bool, given: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Return what `own`, `scaled_dot_product_attention`, does: (B, H, L, D). given: its other arguments."""

    @abstractmethod
    def attend_flex(
        self, call: StackCall, own: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]
    ) -> Any:
        """Return what `own`, flex attention of a plain model, does: (B, H, L, D). given: its other arguments."""


def method_of(word: str) -> ContextMethod:
    """Return the method that `ContextParallel.method` calls `word`."""
    method: ContextMethod = importlib.import_module(f"{__name__}.{word}").METHOD
    return method
