"""torch's random numbers on the CPU: the state at a region's entry, where its forward drew from them.

That state is 5,056 bytes, which every region would copy and compare at its entry and at its end, though next to none
draws. So a mark of it is read where it lies: the position, the second number of a pair of normals, and the first of the
624 words, which are exchanged all at once. The state itself is asked for where the mark is another one. That the mark
lies there, and is another one after every kind of number, is tried with a generator of our own; where it is not, the
states are compared.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import torch

from nemo_like.torch_compat import generator_address, unseen

_WORDS = 624
_HEAD = struct.Struct("=Qi?3xI16I")
"""Seed, numbers that are left, whether it was seeded, position, and the first words."""
_TAIL_AT, _TAIL = 8 + 4 + 4 + 4 + 4 * _WORDS + 4, 24
"""Where behind the words, aligned to 8 bytes, the waiting normals of either precision lie, and how many bytes they take."""
_SEARCHED = 256
"""Bytes from the start of a generator among which its state may begin."""

State = tuple[bytes, torch.Tensor]
"""The mark, empty where none can be read, and the state."""


class CpuRandom:
    """The state of torch's generator on the CPU."""

    def __init__(self) -> None:
        offset = _offset()
        self._mark = None if offset is None else _mark_of(torch.default_generator, offset)
        self._known: State = b"", torch.empty(0)

    def now(self) -> State:
        """Something to hand to `is_at` and to ``torch.set_rng_state``."""
        if self._mark is None:
            return b"", torch.get_rng_state()
        mark = self._mark()
        if mark != self._known[0]:
            self._known = mark, torch.get_rng_state()
        return self._known

    def is_at(self, state: State) -> bool:
        """Whether nothing was drawn since `state`."""
        if self._mark is None:
            return torch.equal(state[1], torch.get_rng_state())
        return self._mark() == state[0]


def _offset() -> int | None:
    """Where in a generator its state begins; None where it was not found, or does not tell of every draw."""
    with unseen():
        generator = torch.Generator().manual_seed(0x1234_5678_9ABC)
        offset = _find(generator)
        if offset is None or _find(torch.default_generator) != offset:
            return None
        mark = _mark_of(generator, offset)
        marks = [mark()]
        for draw in ("uniform_", "normal_", "normal_"):  # the second one takes the number that waits
            for dtype in (torch.float32, torch.float64):
                getattr(torch.empty(1, dtype=dtype, device="cpu"), draw)(generator=generator)
                marks.append(mark())
        return offset if len(set(marks)) == len(marks) else None


def _mark_of(generator: torch.Generator, offset: int) -> Callable[[], bytes]:
    """What reads the mark of `generator`, which must outlive it; its state begins at `offset`."""
    address = generator_address(generator)
    head = (ctypes.c_char * _HEAD.size).from_address(address + offset)
    tail = (ctypes.c_char * _TAIL).from_address(address + offset + _TAIL_AT)
    return lambda: head.raw + tail.raw


def _find(generator: torch.Generator) -> int | None:
    """Where `generator` holds what its `get_state` tells."""
    address = generator_address(generator)
    state = generator.get_state()
    told = struct.Struct("=QiiQ16Q")
    seed, left, seeded, position, *words = told.unpack(ctypes.string_at(state.data_ptr(), told.size))
    wanted = seed, left, bool(seeded), position, *words
    for offset in range(0, _SEARCHED, 8):
        if _HEAD.unpack(ctypes.string_at(address + offset, _HEAD.size)) == wanted:
            return offset
    return None
