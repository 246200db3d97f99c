"""Which of the tensors that autograd saves in a module's forward come from elsewhere: learned from its first replay.

Of those a region keeps a weak reference to the memory, to notice a change in place before backward (see
`Region.check_same_version`). For the many that the forward makes itself that would take time and tell nothing.
"""

from __future__ import annotations


class Outside:
    """What was learned of one module; `indices` is None while nothing is known."""

    __slots__ = ("_count", "_stamp", "indices")

    def __init__(self) -> None:
        self._stamp: object = None
        self._count = 0
        self.indices: frozenset[int] | None = None

    def check(self, stamp: object) -> frozenset[int] | None:
        """`indices`, for a forward that begins; forgotten where `stamp` is another one (a mask is cached from now on)."""
        if stamp is not self._stamp:
            self._stamp, self.indices = stamp, None
        return self.indices

    def forward_done(self, count: int, used: frozenset[int] | None) -> None:
        """After a forward that saved `count` tensors and knew of `used`: another number is another forward."""
        if used is not None and used is self.indices and count != self._count:
            self.indices = None

    def learn(self, count: int, known: set[int]) -> None:
        """After a replay of a forward that saved `count` tensors, of which those `known` were made in it, or are watched
        by others: parameters and buffers by `ModuleWorld`, arguments by `SavedInputs`."""
        self._count = count
        self.indices = frozenset(range(count)) - known
