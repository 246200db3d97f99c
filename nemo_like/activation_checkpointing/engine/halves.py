"""A backward that a pipeline schedule cuts in two: gradients of inputs first, of weights later. One recomputation for both.

The first half recomputes a region, and what the second half still needs stays in the handles that autograd holds. Which
handles these are, and how often each is opened in the first half, is learned from the first backward of a module; from then
on a tensor goes as soon as the first half has used it, unless the second one needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_current: str | None = None  # of the process: on a GPU, autograd's own threads run the hooks


@contextmanager
def half_of_backward(half: str) -> Iterator[None]:
    """Backward in here is ``"inputs"``, the half for the gradients of inputs, or ``"weights"``, the other one.

    One call of each for a graph, in this order; the first with ``retain_graph=True``.
    """
    global _current
    before, _current = _current, half
    try:
        yield
    finally:
        _current = before


def current_half() -> str | None:
    """Return the half of backward that runs now; None: backward in one piece."""
    return _current


class Halves:
    """Facts learned of one module."""

    __slots__ = ("count", "learning", "needed", "opened")

    def __init__(self) -> None:
        self.count = -1
        """Tensors that autograd saved in the forward that was looked at"""
        self.opened: Counter[int] = Counter()
        """Number of times that the first half opens each tensor."""
        self.needed: frozenset[int] = frozenset()
        """Tensors that the second half opens."""
        self.learning: SplitBackward | None = None
        """The two halves of the forward that is being learned from, until it is over."""


class SplitBackward:
    """The two halves of the backward of one region's graph."""

    def __init__(self, learned: Halves | None, count: int) -> None:
        self._learned, self._count = learned, count
        self._opened: Counter[int] = Counter()
        self._needed: set[int] = set()
        if learned is not None and learned.learning is not None:
            learned.learning.hand_on()  # no half is running now but this one
        self._known = learned if learned is not None and learned.count == count else None
        if self._known is None and learned is not None:
            learned.learning = self

    def uses(self, index: int) -> bool:
        """Return whether either half opens tensor `index`, as far as is known."""
        return self._known is None or index in self._known.opened or index in self._known.needed

    def is_done_with(self, index: int) -> bool:
        """Call when tensor `index` is opened; whether it is opened for the last time."""
        if _current != "inputs":
            self._needed.add(index)
            return False  # autograd drops it with the node
        self._opened[index] += 1
        known = self._known
        return known is not None and index not in known.needed and self._opened[index] >= known.opened[index]

    def was_wrong(self) -> None:
        """A tensor is opened that was not to be: this backward is another one. The region is recomputed once more."""
        if self._learned is not None:
            self._learned.count = -1

    def hand_on(self) -> None:
        """Remember what was seen, once the second half has been."""
        if self._learned is not None and self._needed:
            self._learned.count, self._learned.opened = self._count, self._opened
            self._learned.needed = frozenset(self._needed)
            self._learned.learning = None
