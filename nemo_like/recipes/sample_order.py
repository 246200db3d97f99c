"""Which samples stand in which rows of which step: pure functions of (lengths, seed, step), the same on every rank.

They do not depend on the number of ranks, and no state has to be saved: a run that resumes, on as many ranks as before or
on others, goes on with the very next sample.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nemo_like.recipes.data import mix, shuffled

_OPEN_ROWS = 64  # rows that wait for a sample that fits: more fill better, and put samples further from their turn


@dataclass
class SampleOrder:
    """The rows of a run. Every sample is used once per epoch, in an order shuffled anew each epoch.

    A row is a list of numbers of samples: one, or with `room` as many as fit.
    """

    lengths: Sequence[int]
    """Tokens that the model reads of each sample."""
    batch_size: int
    """Rows per step over all ranks and microbatches."""
    seed: int
    room: int | None = None
    """Tokens of a packed row; None: one sample a row. No sample is longer."""
    _epochs: list[list[list[int]]] = field(default_factory=list)  # only the newest two are kept
    _first_rows: list[int] = field(default_factory=lambda: [0])

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the first epoch; of packed ones, others may have a few more or less."""
        return len(self.lengths) if self.room is None else len(self._epoch(0))

    def rows(self, step: int) -> list[list[int]]:
        """The rows of the global batch of `step`."""
        first = step * self.batch_size
        return [self._row(first + i) for i in range(self.batch_size)]

    def _row(self, number: int) -> list[int]:
        count = len(self.lengths)
        if self.room is None:
            epoch, place = divmod(number, count)
            return [shuffled(place, count, mix(self.seed, epoch, 2))]
        epoch = 0
        while number >= self._end(epoch):
            epoch += 1
        return self._epoch(epoch)[number - self._first_rows[epoch]]

    def _end(self, epoch: int) -> int:
        if len(self._first_rows) < epoch + 2:
            self._first_rows.append(self._first_rows[epoch] + len(self._epoch(epoch)))
        return self._first_rows[epoch + 1]

    def _epoch(self, epoch: int) -> list[list[int]]:
        while len(self._epochs) <= epoch:
            self._epochs.append([])
        if not self._epochs[epoch]:
            key = mix(self.seed, epoch, 2)
            count = len(self.lengths)
            assert self.room is not None
            self._epochs[epoch] = pack((shuffled(i, count, key) for i in range(count)), self.lengths, self.room)
            for old in range(epoch - 1):
                self._epochs[old] = []
        return self._epochs[epoch]


def pack(order: Iterable[int], lengths: Sequence[int], room: int) -> list[list[int]]:
    """Samples into rows of at most `room` tokens, each into the fullest open row that it fits in.

    >>> pack(range(4), [3, 2, 1, 2], 4)
    [[0, 2], [1, 3]]
    """
    rows: list[list[int]] = []
    opened: list[tuple[int, int]] = []  # (tokens left, number of the row), by room
    for sample in order:
        length = lengths[sample]
        at = bisect_left(opened, (length, -1))
        if at < len(opened):
            left, row = opened.pop(at)
        else:
            left, row = room, len(rows)
            rows.append([])
            if len(opened) == _OPEN_ROWS:
                opened.pop(0)
        rows[row].append(sample)
        if left > length:
            insort(opened, (left - length, row))
    return rows
