"""Python's search for garbage, made rare where many objects are made that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for garbage less often: imports, traces and plans make millions of objects, and each look takes seconds.

    Two that overlap, in two threads, leave the thresholds as they were:

    >>> from contextlib import ExitStack
    >>> before, one, other = gc.get_threshold(), ExitStack(), ExitStack()
    >>> one.enter_context(rare_collections()), other.enter_context(rare_collections())
    (None, None)
    >>> one.close(), other.close(), gc.get_threshold() == before
    (None, None, True)
    """
    before, rare = gc.get_threshold(), (100_000, 50, 100)
    gc.set_threshold(*rare)
    try:
        yield
    finally:
        if before != rare:  # else a caller, or another thread that plans, puts them back
            gc.set_threshold(*before)
