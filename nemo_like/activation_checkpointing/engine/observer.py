"""The one place where somebody may look on while regions run (`trace` does)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

start: Callable[..., Any] | None = None
"""Makes, for one region's forward, a dispatch mode with a method ``packed(tensor)``; None: nobody looks on."""
done: Callable[[Any], None] | None = None
"""Called with that mode at the end of the region's forward."""


@contextmanager
def watching(at_start: Callable[..., Any], at_end: Callable[[Any], None]) -> Iterator[None]:
    """Look on at every region whose forward starts inside; raises RuntimeError if somebody does already."""
    global start, done
    if start is not None:
        raise RuntimeError("Regions are being traced already; end that trace first.")
    start, done = at_start, at_end
    try:
        yield
    finally:
        start = done = None
