"""Short strings that callers write: words, sizes in bytes, dtypes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported where a dtype is read: the help of a program reads none
    import torch

_BYTE_UNITS = (
    {"B": 1}
    | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
    | {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}
)
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
# By word, torch's name of the dtype.
_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
# By annotation, the classes of a number, and it in words.
_NUMBERS = {"int": (int, "whole number"), "float": (int | float, "finite number")}

# Bytes of each unit, and its name; the largest first.
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
GIB, MIB = UNITS[0][0], UNITS[1][0]


def normalise(word: str) -> str:
    """Lower case, ``-`` as ``_``, no outer blanks: how every short string of ours is compared."""
    return word.strip().lower().replace("-", "_")


def did_you_mean(word: str, known: Collection[str]) -> str:
    """``" Did you mean 'x'?"``, or nothing where nothing is close."""
    close = get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def a_or_an(value: object) -> str:
    """The class of `value` in words, for an error.

    >>> a_or_an(3), a_or_an("x")
    ('an int', 'a str')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def check_bool(name: str, value: object) -> None:
    """Raise TypeError where `value`, of the setting `name`, is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be True or False.")


def check_number(
    name: str,
    value: Any,
    least: float,
    words: str = "finite number",
    kind: Any = int | float,
    above: bool = False,
    wrong_kind: type[Exception] = ValueError,
) -> None:
    """Raise where `value`, of the setting `name`, is not a finite number of this `kind` from `least` on.

    words: such a number, for the message.
    above: `least` itself is too small.
    wrong_kind: the error for a value that is not even a number.
    """
    wrong = ValueError if isinstance(value, int | float) else wrong_kind
    number = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < least or (above and value == least):
        raise wrong(f"{name} is {value!r}; it must be a {words} {'above' if above else '>='} {least}.")


def check_whole(name: str, value: object, least: int) -> None:
    """Raise ValueError where `value`, of the setting `name`, is not a whole number >= `least`."""
    check_number(name, value, least, "whole number", int)


def check_word(name: str, value: object, known: Collection[str], others: str = "") -> str:
    """Return the word in `known` that `value`, of the setting `name`, means; ValueError: none.

    others: values that it may have besides, for the message.
    """
    spelled = {normalise(each): each for each in known}
    word = normalise(value) if isinstance(value, str) else str(value)
    if not isinstance(value, str) or word not in spelled:
        near = did_you_mean(word, known)
        raise ValueError(f"{name} is {value!r}; it must be {others}one of {', '.join(known)}.{near}")
    return spelled[word]


def setting(default: Any, /, **facts: Any) -> Any:
    """Return a field of an options class that `check_fields` checks by these `facts`.

    ``least`` or ``above``: the smallest number, or the one that is too small; ``below``: one that is too large; ``unit``:
    such a number in words; ``wrong_kind``: the error for a value that is none; ``choices``: the words that it may be;
    ``called``: its name in messages.
    """
    return dataclasses.field(default=default, metadata=facts)


def check_fields(options: Any, label: Callable[[str], str] | None = None) -> None:
    """Check the fields of a frozen dataclass by their annotations, which are strings, and the facts of `setting`.

    Bools are True or False; numbers with a bound are in it; words with choices become one of these; ``| None``: or None.
    Other fields are left alone.

    label: makes the name in a message of a field's name. Default: behind that of the class.

    Raises:
        TypeError: not a bool, or another kind of value where a field has that error for it.
        ValueError: another wrong value.
    """
    label = label or f"{type(options).__name__}.{{}}".format
    for field in dataclasses.fields(options):
        value, facts = getattr(options, field.name), field.metadata
        name, least = facts.get("called") or label(field.name), facts.get("above", facts.get("least"))
        kind, optional, _ = field.type.partition(" | None")
        if optional and value is None:
            continue
        if kind == "bool":
            check_bool(name, value)
        elif kind == "str" and facts.get("choices"):
            word = check_word(name, value, facts["choices"], "None or " if optional else "")
            object.__setattr__(options, field.name, word)
        elif kind in _NUMBERS and least is not None:
            number, words = _NUMBERS[kind]
            wrong = facts.get("wrong_kind", ValueError)
            check_number(name, value, least, facts.get("unit") or words, number, "above" in facts, wrong)
            if value >= facts.get("below", math.inf):
                raise ValueError(f"{name} is {value!r}; it must be less than {facts['below']}.")


def parse_bytes(text: str, name: str = "") -> int:
    """``"40GiB"``, ``"80 GB"`` or ``"512MiB"`` as a whole number of bytes. `name` is the argument's, for the error.

    >>> parse_bytes("1.5KiB")
    1536
    """
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else ""
    if match is not None and not unit:
        raise ValueError(f"{name or 'A size'} is {text!r}, without a unit. Write {with_unit(match[1])!r}.")
    if match is None or unit not in _BYTE_UNITS:
        raise ValueError(
            f"{name or 'A size'} is {text!r}, which is not a number of bytes; write it like '40GiB', '80GB' or '512MiB'."
        )
    return math.floor(float(match[1]) * _BYTE_UNITS[unit])


def is_number(text: str) -> bool:
    """Return whether `text` is a number of bytes that lacks its unit."""
    return re.fullmatch(rf"\s*{_NUMBER}\s*", text) is not None


def with_unit(number: str) -> str:
    """A number without a unit as it is likely meant: GiB, or, where that is more than any device has, bytes.

    >>> with_unit("40"), with_unit("42949672960")
    ('40GiB', '42949672960B')
    """
    return f"{number}{'GiB' if float(number) < 10_000 else 'B'}"


def exact_bytes(size: int) -> str:
    """The shortest text that `parse_bytes` reads back as just `size`; of equally short ones, that in the largest unit.

    >>> exact_bytes(40 << 30), exact_bytes(65068754534), exact_bytes(65068754535)
    ('40GiB', '60.6GiB', '65068754535B')
    """
    units = [(unit, name) for unit, name in UNITS if size >= unit]
    words = [f"{size / unit:.{decimals}f}{name}" for unit, name in units for decimals in range(4)]
    return min((word for word in [*words, f"{size}B"] if parse_bytes(word) == size), key=len, default=f"{size}B")


def write_bytes(size: int) -> str:
    """``"40.00GiB"``, ``"0.50MiB"``, ``"1.00KiB"`` or ``"512B"``: as `parse_bytes` reads them.

    >>> write_bytes(3 << 29), write_bytes(1536), write_bytes(0)
    ('1.50GiB', '1.50KiB', '0B')
    """
    units = ((unit if name == "KiB" else unit // 4, unit, name) for unit, name in UNITS)
    return next((f"{size / unit:.2f}{name}" for least, unit, name in units if abs(size) >= least), f"{size}B")


def parse_dtype(name: str, value: object, others: Sequence[str] = ()) -> torch.dtype | None:
    """A torch dtype, its name (``"bf16"``, ``"bfloat16"``, ...) or None.

    `name` is the argument's, and `others` are words that it takes besides, for the error.
    """
    if value is None:
        return None
    if isinstance(value, str):
        check_dtype_word(name, value, others)
    import torch

    if isinstance(value, torch.dtype):
        if not value.is_floating_point:
            raise ValueError(f"{name} is {value}; it must be a floating-point dtype.")
        return value
    return getattr(torch, _DTYPES[check_dtype_word(name, value, others)])


def check_dtype_word(name: str, value: object, others: Sequence[str] = ()) -> str:
    """Return the word for a dtype in lower case; ValueError: it is none. Without torch."""
    if isinstance(value, str) and normalise(value) in _DTYPES:
        return normalise(value)
    raise ValueError(f"{name} is {value!r}; it must be a torch dtype or one of {', '.join((*_DTYPES, *others))}.")


def dtype_word(dtype: torch.dtype | None) -> str | None:
    """The shortest word that `parse_dtype` takes for `dtype`; None for None.

    >>> import torch
    >>> dtype_word(torch.bfloat16)
    'bf16'
    """
    name = str(dtype).removeprefix("torch.")
    words = [word for word, known in _DTYPES.items() if known == name]
    return None if dtype is None else min(words, key=len, default=name)


def parse_shape(name: str, text: str) -> tuple[int, ...]:
    """``"8,3,32,32"`` as sizes, each >= 1. `name` is the argument's, for the error.

    >>> parse_shape("--input-shape", "8,3")
    (8, 3)
    """
    words = text.split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise ValueError(f"{name} is {text!r}; write sizes >= 1 like 8,3,32,32.")
    return tuple(int(word) for word in words)


def field_names(cls: type) -> tuple[str, ...]:
    """The names of a dataclass's fields, in order."""
    return tuple(field.name for field in dataclasses.fields(cls))
