"""Toys for each registry of options: objects of others under a word of their own, so that all numbers are known."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nemo_like.distributed.context.methods import METHODS, GatherKeys
from nemo_like.options import OPTIMIZERS, SCHEDULES
from nemo_like.options.parallel import CONTEXT_METHODS

WORD = "toy"
KNOWN = {"cp_method": "all_gather", "schedule": "1f1b", "optimizer": "sgd-momentum"}
"""The words of the objects that the toys are copies of."""


class _Toy(GatherKeys):
    word = WORD

    def check(self, stack: Any, ranks: int) -> None:
        if ranks == 3:
            raise ValueError("method='toy' has no three ranks.")


def register(put: Callable[[dict[str, Any], str, Any], None] = dict.__setitem__) -> None:
    """Put a toy into each registry; `put`: by default till the process ends."""
    put(METHODS, WORD, _Toy())
    put(CONTEXT_METHODS, WORD, replace(CONTEXT_METHODS[KNOWN["cp_method"]], rotation=None))
    put(SCHEDULES, WORD, replace(SCHEDULES[KNOWN["schedule"]], name=WORD))
    put(OPTIMIZERS, WORD, replace(OPTIMIZERS[KNOWN["optimizer"]], name=WORD))
