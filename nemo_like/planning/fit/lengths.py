"""Sequences of different lengths: the one that a step is planned for, and what that leaves uncovered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

USUAL = 4096
"""Tokens of a sequence where the caller gives no length."""


def planned_length(
    seq_len: int | None, longest: int | None = None, p99: int | None = None, histogram: Mapping[int, int] | None = None
) -> tuple[int, str]:
    """Return the tokens of the longest sequence that a step is planned for, and in words which sequences these are.

    Args:
        seq_len: the length where nothing else is known; None: `USUAL`.
        longest: no sequence has more tokens.
        p99: 99 of 100 sequences have no more.
        histogram: sequences by their tokens; its longest is planned for.

    Raises:
        ValueError: the values contradict each other, or the histogram has no sequence.
        TypeError: a value is not a whole number.

    >>> planned_length(4096, longest=9000, p99=6000)
    (9000, 'the longest sequences, of 9000 tokens')
    """
    for name, value in (("max_seq_len", longest), ("p99", p99)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} is {value!r}; it must be a whole number of tokens.")
        if value is not None and value < 2:
            raise ValueError(f"{name} is {value}; it must be >= 2 tokens.")
    if histogram is not None:
        if longest is not None or p99 is not None:
            raise ValueError("lengths has all sequences, so that max_seq_len and p99 are known. Give one or the other.")
        longest = _longest(histogram)
    if longest is not None and p99 is not None and p99 > longest:
        raise ValueError(f"p99 is {p99}, and max_seq_len, {longest}, is less. Exchange them, or leave one out.")
    least = p99 if longest is None else longest
    if seq_len is not None and least is not None and seq_len > least:
        name = "lengths" if histogram is not None else "p99" if longest is None else "max_seq_len"
        raise ValueError(
            f"seq_len is {seq_len}, and {name} says that sequences have up to {least} tokens. Leave seq_len out, or give a "
            f"larger {name}."
        )
    if longest is not None:
        return longest, f"the longest sequences, of {longest} tokens"
    if p99 is not None:
        return p99, (
            f"sequences of {p99} tokens: 1 of 100 is longer, and a step with such a one takes more than is reported; give "
            "max_seq_len to plan for the longest"
        )
    seq_len = USUAL if seq_len is None else seq_len
    return seq_len, f"sequences of {seq_len} tokens"


def read_histogram(path: str | Path) -> dict[int, int]:
    """Read sequences by their tokens from a file: JSON, ``{"512": 1000, ...}``, or one sequence's tokens a line.

    Raises:
        ValueError: it cannot be read; the message states where and why.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Lengths {str(path)!r} cannot be read: {error}") from error
    counts: dict[int, int] = {}
    try:
        if text.lstrip().startswith("{"):
            for length, count in json.loads(text).items():
                counts[int(length)] = int(count)
            return counts
        for line in text.split():
            counts[int(line)] = counts.get(int(line), 0) + 1
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"Lengths {str(path)!r} must be JSON of counts by tokens, or one number a line: {error}"
        ) from error
    return counts


def _longest(histogram: Mapping[int, int]) -> int:
    there = []
    for length, count in histogram.items():
        if (
            isinstance(length, bool)
            or not isinstance(length, int)
            or isinstance(count, bool)
            or not isinstance(count, int)
        ):
            raise TypeError(f"lengths has {length!r}: {count!r}; tokens and counts must be whole numbers.")
        if length < 1 or count < 0:
            raise ValueError(f"lengths has {count} sequences of {length} tokens; that cannot be.")
        there += [length] if count else []
    if not there:
        raise ValueError("lengths has no sequence. Count some, or give seq_len.")
    return max(there)
