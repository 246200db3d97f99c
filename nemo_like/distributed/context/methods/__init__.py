"""Ways in which the queries of a rank meet the keys of the others: one object for each word of
`ContextParallel.method`.

The object of a word is ``METHOD`` of the file in this folder that is called as the word. The operators that it sends with
define what plans count for them (`sequence_ops`).
"""

from __future__ import annotations

import importlib

from nemo_like.distributed.context.parts import ContextMethod


def method_of(word: str) -> ContextMethod:
    """Return the method that `ContextParallel.method` calls `word`."""
    method: ContextMethod = importlib.import_module(f"{__name__}.{word}").METHOD
    return method
