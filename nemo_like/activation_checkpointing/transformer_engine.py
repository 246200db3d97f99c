"""Transformer Engine's choice of an attention back end, made in recomputation as in forward (NeMo Automodel#3330)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from nemo_like.activation_checkpointing.engine.global_state import Restore

# Modules, newest first, whose `_attention_backends` dict caches the attention back end that was chosen last.
_TE_ATTENTION = (
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",
    "transformer_engine.pytorch.attention",
)


def attention_back_end() -> Restore | None:
    """Recomputation chooses as forward did: the cache is put back as forward found it (NeMo Automodel#3330).

    Only where Transformer Engine has been imported; its cache is private, and absent means nothing to keep.
    """
    for name in _TE_ATTENTION:
        cache = getattr(sys.modules.get(name), "_attention_backends", None)
        if isinstance(cache, dict):
            entries = dict(cache)
            return lambda: _dict_contents(cache, entries)
    return None


@contextlib.contextmanager
def _dict_contents(target: dict[Any, Any], contents: dict[Any, Any]) -> Iterator[None]:
    present = dict(target)
    target.clear()
    target.update(contents)
    try:
        yield
    finally:
        target.clear()
        target.update(present)
