"""Python's and NumPy's global random numbers: the state at a region's entry, where its forward drew from them.

Both keep 2,500 bytes, and asking for them takes 14 µs in Python and 50 µs in NumPy: too dear for every region of every
step, when next to none draws. Both are a Mersenne Twister in C, so those bytes are read where they lie, after a check
that they are there; where they are not, the public functions are asked.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from nemo_like.activation_checkpointing.engine.generators import same_state

_WORDS = 624
_HEAD = 64
"""Bytes by which a set of words is known again."""


def _at(kind: Any, address: int) -> Any:
    """What lies there, as an object of ctypes."""
    return kind.from_address(address)


class _Twister:
    """The words and the position of a generator in C; where its words lie, and behind or before them its position."""

    __slots__ = ("_head", "_known", "_known_head", "_position", "_words")

    def __init__(self, words: int, position: int) -> None:
        self._words = _at(ctypes.c_char * (4 * _WORDS), words)
        self._head = _at(ctypes.c_char * _HEAD, words)
        self._position = _at(ctypes.c_int, position)
        self._known_head, self._known = b"", b""

    def now(self) -> tuple[bytes, int]:
        """All words, and how many of them are used. New words come for every 624 numbers, and all of them at once: so
        they are copied only where the first ones are others, which leaves the processor's cache to those who compute."""
        head = self._head.raw
        if head != self._known_head:
            self._known_head, self._known = head, self._words.raw
        return self._known, self._position.value


def words_of(state: tuple[bytes, int]) -> tuple[int, ...]:
    """The words of what `_Twister.now` returned."""
    return struct.unpack(f"={_WORDS}I", state[0])


def _python_twister(generator: random.Random) -> _Twister | None:
    """The state of `generator` as CPython lays it out, position first; None on an interpreter that does otherwise."""
    if sys.implementation.name != "cpython":
        return None
    position = id(generator) + object.__basicsize__
    twister = _Twister(position + 4, position)
    words, now = generator.getstate()[1], twister.now()
    return twister if (*words_of(now), now[1]) == words else None


class _Python:
    """The functions of the module `random`."""

    def __init__(self) -> None:
        self._generator: random.Random = random.random.__self__  # type: ignore[attr-defined]
        self._twister = _python_twister(self._generator) if type(self._generator) is random.Random else None

    def now(self) -> Any:
        if self._twister is None:
            return self._generator.getstate()
        return self._twister.now(), self._generator.gauss_next  # type: ignore[attr-defined]

    def put(self, state: Any) -> None:
        if self._twister is not None:
            state = (3, (*words_of(state[0]), state[0][1]), state[1])
        self._generator.setstate(state)


class _NumPy:
    """The functions of `numpy.random`, where somebody has imported it."""

    def __init__(self, numpy_random: Any) -> None:
        self._random = numpy_random
        self._bits: Any = None
        self._twister: _Twister | None = None
        self._generator: Callable[[], Any] = getattr(
            numpy_random, "get_bit_generator", lambda: None
        )  # since NumPy 1.24
        self._last: tuple[tuple[bytes, int], Any] | None = None

    def now(self) -> Any:
        """Something to compare and to hand to `put`."""
        generator = self._generator()
        if generator is not self._bits:
            self._bits, self._last = generator, None
            self._twister = _numpy_twister(generator) if type(generator).__name__ == "MT19937" else None
        if self._twister is None:
            return _NumPyState(self._random.get_state(legacy=False))
        bits = self._twister.now()
        # The bytes don't hold the second number of a pair of normals; while one waits they alone tell too little.
        if self._last is None or self._last[0] != bits or self._last[1]["has_gauss"]:
            self._last = bits, self._random.get_state(legacy=False)
        state = self._last[1]
        return bits, state["gauss"] if state["has_gauss"] else None

    def put(self, state: Any) -> None:
        if isinstance(state, _NumPyState):
            self._random.set_state(state.value)
            return
        waiting, gauss = state[1] is not None, state[1] or 0.0
        self._random.set_state(("MT19937", words_of(state[0]), state[0][1], int(waiting), gauss))


class _NumPyState:
    """What NumPy's own function tells of a generator, made comparable."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NumPyState) and same_state(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]


def _numpy_twister(generator: Any) -> _Twister | None:
    words = generator.ctypes.state_address
    twister = _Twister(words, words + 4 * _WORDS)
    state, now = generator.state["state"], twister.now()
    return twister if (*words_of(now), now[1]) == (*state["key"].tolist(), state["pos"]) else None


_python = _Python()
_numpy: _NumPy | None = None


def _sources() -> list[_Python | _NumPy]:
    global _numpy
    if _numpy is None:
        numpy_random = sys.modules.get("numpy.random")
        # While NumPy is being imported its module is there, and not yet whole.
        if numpy_random is None or not hasattr(numpy_random, "set_state"):
            return [_python]
        _numpy = _NumPy(numpy_random)
    return [_python, _numpy]


class HostRandom:
    """Both states at the moment of creation; `restore` puts back those that were drawn from since."""

    __slots__ = ("_states",)

    def __init__(self) -> None:
        self._states: list[Any] = [(source, source.now()) for source in _sources()]

    def forget_unused(self) -> bool:
        """Call at the end of forward: drops the states that nothing drew from. Returns whether any is left."""
        self._states = [(source, state) for source, state in self._states if source.now() != state]
        return bool(self._states)

    def restore(self, stack: ExitStack) -> None:
        """Put the states back until `stack` ends."""
        for source, state in self._states:
            stack.callback(source.put, source.now())
            source.put(state)
