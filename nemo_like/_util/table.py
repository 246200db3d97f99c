"""Tables for a terminal, a log or a notebook, and the numbers in them."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from nemo_like._util.words import UNITS

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Column:
    """One column of a `Table`."""

    name: str
    # Place in the order in which columns are dropped where the screen is too narrow: 0 never, then the smallest
    # number last.
    keep: int = 0
    left: bool = False  # Align to the left, as text is.
    # To how many characters its text may be cut before a column is left out; None: it is never cut.
    least: int | None = None
    # The column is not shown where no row has another text; None: where all rows have the same.
    usual: str | None = ""


class Fact(NamedTuple):
    """One value of a line of a report: for JSON, for its table, or for both."""

    key: str  # Its name in JSON, with the unit; empty: it is in the table alone.
    value: Any
    column: Column | None = None  # Its column; None: it is in JSON alone.
    text: Callable[[Any], Any] = str  # Writes a value that is not None.
    nothing: str = ""  # Text of None.


def as_json(facts: Iterable[Fact]) -> dict[str, Any]:
    """Return a line in JSON values."""
    return {fact.key: fact.value for fact in facts if fact.key}


@dataclass(frozen=True)
class Table:
    """Rows of text under named columns. A column without news, as one that is empty in every row, is never shown."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, lines: Iterable[Iterable[Fact]]) -> Table:
        """Return the table of lines that have the same columns.

        >>> Table.of([[Fact("ms", 1.5, Column("ms"), three_digits), Fact("flops", 3)], [Fact("ms", None, Column("ms"))]])
        Table(columns=(Column(name='ms', keep=0, left=False, least=None, usual=''),), rows=(('1.50',), ('',)))
        """
        shown = [[fact for fact in line if fact.column] for line in lines]
        rows = (
            tuple(fact.nothing if fact.value is None else str(fact.text(fact.value)) for fact in line) for line in shown
        )
        return cls(tuple(fact.column for fact in shown[0] if fact.column) if shown else (), tuple(rows))

    def text(self, width: int | None = None) -> str:
        """Return the table in at most `width` columns of text, if leaving columns out can do that; None: all of it.

        >>> table = Table((Column("ac", left=True), Column("peak"), Column("at", keep=1)), (("full", "45.5", "head"),))
        >>> print(table.text())
        ac    peak    at
        full  45.5  head
        >>> print(table.text(width=12))
        ac    peak
        full  45.5
        """
        shown = self.shown(width)
        sizes = self._sizes()
        for i in shown:
            over = 0 if width is None else sum(sizes[j] + 2 for j in shown) - 2 - width
            least = self.columns[i].least
            if over > 0 and least is not None:
                sizes[i] = max(sizes[i] - over, min(sizes[i], least))
        lines = [tuple(column.name for column in self.columns), *self.rows]
        return "\n".join(
            "  ".join(
                cut(line[i], sizes[i]).ljust(sizes[i]) if self.columns[i].left else line[i].rjust(sizes[i])
                for i in shown
            ).rstrip()
            for line in lines
        )

    def shown(self, width: int | None = None) -> list[int]:
        """Return the numbers of the columns that `text` shows in `width`."""
        least = [column.least for column in self.columns]
        sizes = [min(size, most or size) for size, most in zip(self._sizes(), least)]
        shown = [i for i in range(len(self.columns)) if not self.rows or self._has_news(i)]
        while width is not None and sum(sizes[i] + 2 for i in shown) - 2 > width:
            last = max(shown, key=lambda i: (self.columns[i].keep, i))
            if not self.columns[last].keep:
                break
            shown.remove(last)
        return shown

    def _has_news(self, i: int) -> bool:
        texts, usual = {row[i] for row in self.rows}, self.columns[i].usual
        return len(texts) > 1 if usual is None else not texts <= {"", usual}

    def with_note(self, note: str = "", width: int | None = None) -> str:
        """Return `text`, and below it `note` together with the names of the columns that do not fit in `width`."""
        shown = self.shown(width)
        names = ", ".join(self.columns[i].name for i in self.shown() if i not in shown)
        below = f"{note} Not shown at this width: {names} (--wide)." if names else note
        return "\n".join([self.text(width), *([paragraph(below.strip(), width)] if below else [])])

    def _sizes(self) -> list[int]:
        return [
            max(len(column.name), *(len(row[i]) for row in self.rows)) if self.rows else len(column.name)
            for i, column in enumerate(self.columns)
        ]


def screen_width() -> int:
    """Return the columns of the terminal, of ``COLUMNS``, or 80 where neither is known."""
    return shutil.get_terminal_size((80, 24)).columns


def cut(text: str, size: int) -> str:
    """Return `text` in at most `size` characters, the middle left out.

    >>> cut("model.layers.0-31", 11), cut("head", 11)
    ('model….0-31', 'head')
    """
    if len(text) <= size:
        return text
    tail = size // 2
    return f"{text[: size - tail - 1]}…{text[len(text) - tail :]}"


def paragraph(text: str, width: int | None) -> str:
    """Return `text` in lines of at most `width`; a longer word has a line of its own."""
    if width is None:
        return text
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class ByteUnit:
    """The one unit of a report."""

    name: str
    size: int

    @classmethod
    def for_sizes(cls, sizes: Iterable[int]) -> ByteUnit:
        """Return the largest unit of which the largest of `sizes` is at least one.

        >>> ByteUnit.for_sizes([3 << 30, 5 << 20]), ByteUnit.for_sizes([700])
        (ByteUnit(name='GiB', size=1073741824), ByteUnit(name='B', size=1))
        """
        most = max(map(abs, sizes), default=0)
        return next((unit for unit in _UNITS if most >= unit.size), _UNITS[-1])

    def number(self, size: float) -> str:
        """Return `size` bytes as a number of this unit, three digits.

        >>> ByteUnit("GiB", 1 << 30).number(57_703_000_000)
        '53.7'
        """
        return three_digits(size / self.size)

    def word(self, size: float) -> str:
        """Return `size` bytes with the unit: ``"53.7 GiB"``."""
        return f"{self.number(size)} {self.name}"


def byte_word(size: int) -> str:
    """Return `size` bytes in the unit that suits it: ``"53.7 GiB"``."""
    return ByteUnit.for_sizes([size]).word(size)


_UNITS = (*(ByteUnit(name, size) for size, name in UNITS), ByteUnit("B", 1))


def of_limit(size: int, limit: int) -> str:
    """Return two sizes with one unit, or with two where they are far from one another.

    >>> of_limit(57 << 30, 67 << 30), of_limit(3 << 20, 67 << 30)
    ('57.0 of 67.0 GiB', '3.00 MiB of 67.0 GiB')
    """
    one, other = ByteUnit.for_sizes([size]), ByteUnit.for_sizes([limit])
    return f"{one.number(size) if one == other else one.word(size)} of {other.word(limit)}"


def three_digits(value: float) -> str:
    """Return `value` with three significant digits, and never more than two behind the point.

    >>> three_digits(2081.4), three_digits(155.2), three_digits(99.97), three_digits(3.914), three_digits(0)
    ('2,080', '155', '100', '3.91', '0')
    """
    if not value:
        return "0"
    size = abs(value)
    if size < 99.95:
        return f"{value:.{1 if size >= 9.995 else 2}f}"
    scale = 10 ** max(0, len(str(round(size))) - 3)
    return f"{round(value / scale) * scale:,}"


def parameters_word(count: int) -> str:
    """Return a number of parameters in three digits.

    >>> parameters_word(8_030_261_248), parameters_word(789_120), parameters_word(96)
    ('8.03 B', '789 K', '96')
    """
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " K")):
        if count >= size:
            return f"{three_digits(count / size)}{unit}"
    return str(count)


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds, as `three_digits` writes them."""
    return three_digits(1000 * seconds)


def yes_no(value: bool | None) -> str:
    return "yes" if value else "no"


def percent(share: float) -> str:
    """Return a share in percent, two digits.

    >>> percent(0.004), percent(0.17), percent(-1e-16)
    ('0.4 %', '17 %', '0 %')
    """
    return f"{100 * share:.1f} %" if 0.0005 <= abs(share) < 0.0995 else f"{round(100 * share)} %"


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, in their order.

    >>> grouped((word[0], word) for word in ("full", "none", "fast"))
    {'f': ['full', 'fast'], 'n': ['none']}
    """
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def totals(sizes: Iterable[tuple[Key, int]]) -> Counter[Key]:
    """Return the sum of the sizes of each key."""
    total = Counter[Key]()
    for key, size in sizes:
        total[key] += size
    return total
