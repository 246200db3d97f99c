"""Generators of random numbers that a region has to itself: their states, put back for its recomputation.

They are found among the attributes of the region's modules, among its arguments, and among the globals that the modules'
methods name. A `torch.Generator` that comes from elsewhere is seen when an operator is given it. Where the policy keeps
something, every operator is seen. Looking on costs time where it does not. There it is done in the first forward of a module
or function, and in later ones if that one found a generator.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import CodeType
from typing import Any

import torch

from nemo_like.torch_compat import generator_address

Key = tuple[Any, bool]
"""A module and whether it trains; or the code of a function."""

_given: weakref.WeakKeyDictionary[Any, dict[bool, bool]] = weakref.WeakKeyDictionary()
"""Flags, by module and by whether it trains: its first forward's operators were given a generator from elsewhere."""
_names: weakref.WeakKeyDictionary[CodeType, tuple[str, ...]] = weakref.WeakKeyDictionary()
_kinds: dict[type, tuple[str, str] | None] = {}
_others: set[type] = set()
"""The types that were seen to be no generator's."""
_UNSEEN = ("", "unseen")


def is_generator(value: object) -> bool:
    """Return whether `value` is a generator of torch, of Python or of NumPy, with a state to put back."""
    kind = type(value)
    if kind not in _kinds:
        _kinds[kind] = _getter_and_setter(kind)
        if _kinds[kind] is None:
            _others.add(kind)
    return _kinds[kind] is not None


def _getter_and_setter(kind: type) -> tuple[str, str] | None:
    if issubclass(kind, torch.Generator):
        return "get_state", "set_state"
    if issubclass(kind, random.Random):
        return None if issubclass(kind, random.SystemRandom) else ("getstate", "setstate")
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None and issubclass(kind, numpy_random.RandomState):
        return "get_state", "set_state"
    if numpy_random is not None and issubclass(kind, numpy_random.Generator):
        return "", ""
    return None


def state_of(generator: Any) -> Any:
    """The state of a generator, for `put_state`."""
    names = _kinds[type(generator)]
    if names is not None and names[0]:
        return getattr(generator, names[0])()
    return generator.bit_generator.state


def put_state(generator: Any, state: object) -> None:
    """Put a generator into the state that `state_of` returned."""
    names = _kinds[type(generator)]
    if names is not None and names[1]:
        getattr(generator, names[1])(state)
    else:
        generator.bit_generator.state = state


class Generators:
    """The generators that one region was seen to have, each with its state of the moment when it was first seen."""

    __slots__ = ("_states",)

    def __init__(self) -> None:
        self._states: dict[int, tuple[Any, Any]] = {}

    def note(self, generator: object) -> bool:
        """Keep the state of `generator`, unless it is none or was seen before; returns whether it is saved now."""
        kind = _kinds.get(type(generator), _UNSEEN)
        if kind is None or (kind is _UNSEEN and not is_generator(generator)):
            return False
        key = generator_address(generator) if isinstance(generator, torch.Generator) else id(generator)
        if key in self._states:
            return False
        self._states[key] = generator, state_of(generator)
        return True

    def note_all(self, values: Sequence[Any]) -> None:
        """`note` each of them."""
        if not _others.issuperset(map(type, values)):
            for value in values:
                self.note(value)

    def note_named(self, function: Any) -> None:
        """`note` the generators that `function` refers to by name: global ones, and those around its definition."""
        if isinstance(function, torch.nn.Module):
            return  # its methods' globals are among what its `ModuleWorld` finds
        for name in names_of_globals(function):
            self.note(function.__globals__.get(name))
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a cell that is empty still
                self.note(cell.cell_contents)

    def forget_unused(self) -> bool:
        """Call at the end of forward: drops what was not drawn from. Returns whether any is left."""
        if self._states:
            noted = self._states.items()
            self._states = {key: (g, state) for key, (g, state) in noted if not same_state(state_of(g), state)}
        return bool(self._states)

    def restore(self, stack: ExitStack) -> None:
        """Put the states back until `stack` ends."""
        # Backwards, so that where one generator was seen as two objects the earlier state wins.
        for generator, state in reversed(self._states.values()):
            stack.callback(put_state, generator, state_of(generator))
            put_state(generator, state)


def same_state(a: Any, b: Any) -> bool:
    """Return whether two states of one generator are equal; there are tensors or arrays in them."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and any(hasattr(item, "tobytes") for item in a):
        return all(map(same_state, a, b))
    return a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else bool(a == b)


def names_of_globals(function: Any) -> tuple[str, ...]:
    """The names of the global generators that the code of `function` refers to, as far as they exist when first asked."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    names = _names.get(code)
    if names is None:
        known = function.__globals__
        names = _names[code] = tuple(name for name in all_names(code) if is_generator(known.get(name)))
    return names


def all_names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in `code`, functions inside of it included."""
    inner = (all_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def are_given(key: Key) -> bool:
    """Return whether operators of a forward of `key` may be given generators from elsewhere: True until `learn` is
    told."""
    return key[0] is None or _given.get(key[0], {}).get(key[1], True)


def learn(key: Key, given: bool) -> None:
    """Call after the first forward of `key`, with whether operators were given a generator from elsewhere."""
    if key[0] is not None:
        _given.setdefault(key[0], {}).setdefault(key[1], given)


def key_of(function: object) -> Key:
    """Return what identifies `function` from one forward to the next, and whether its module trains."""
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return owner, owner.training
    return getattr(function, "__code__", None), True


# Python's and NumPy's global random numbers: the state at a region's entry, where its forward drew from them.
#
# Both keep 2,500 bytes, and asking for them takes 14 µs in Python and 50 µs in NumPy: too dear for every region of every
# step, when next to none draws. Both are a Mersenne Twister in C, so those bytes are read where they lie, after a check
# that they are there; where they are not, the public functions are asked.

_WORDS = 624
_HEAD = 64
"""Bytes by which a set of words is known again."""


def _at(kind: Any, address: int) -> Any:
    """Return the value at that address, as an object of ctypes."""
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
    """The functions of `numpy.random`, where it has been imported."""

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
    """The state that NumPy's own function tells of a generator, made comparable."""

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
        for source, _ in self._states:
            stack.callback(source.put, source.now())
        self.put()

    def put(self) -> None:
        """Put the states back."""
        for source, state in self._states:
            source.put(state)
