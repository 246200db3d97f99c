"""The names that a function's code reads, and the calls that have led to a line."""

import inspect
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any


def names_in(function: Any) -> frozenset[str]:
    """Return the names of globals and attributes in `function`, unwrapped, or in a code object; functions inside included.

    Empty for a function without code of Python's.
    """
    code = getattr(inspect.unwrap(function), "__code__", function)
    codes = [code] if isinstance(code, CodeType) else []
    for each in codes:
        codes += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
    return frozenset(name for each in codes for name in each.co_names)


def callers() -> Iterator[FrameType]:
    """Yield the frames of the calls under way, innermost first: it begins with the function that loops over this."""
    frame = inspect.currentframe()
    while frame is not None and (frame := frame.f_back) is not None:
        yield frame
