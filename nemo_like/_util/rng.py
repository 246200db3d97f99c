"""Generators of random numbers: torch's of the CPU and of the accelerator in use, and those that models draw from."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from nemo_like._util.tensors import bytes_of

# Functions that read the state of a generator, as a value to compare and to send, and set it.
Access = tuple[Callable[[], Any], Callable[[Any], Any]]
RngState = tuple[torch.Tensor, str | None, torch.Tensor | None] | tuple[torch.Generator, torch.Tensor]


def accelerator_type() -> str | None:
    """The accelerator that is in use by this process (``"cuda"``, ...), or None. Never initialises one."""
    if torch.cuda.is_initialized():
        return "cuda"
    other = _other_accelerator()
    initialized = getattr(torch.get_device_module(other), "is_initialized", None) if other is not None else None
    return other if initialized is not None and initialized() else None


@cache  # a machine's devices don't change, and every region calls this
def _other_accelerator() -> str | None:
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if current is None or current.type == "cuda" else current.type


def rng_state(generator: torch.Generator | None = None) -> RngState:
    """The random-number state of the CPU and of the accelerator in use, or of `generator`."""
    if generator is not None:
        return generator, generator.get_state()
    device = accelerator_type()
    return torch.get_rng_state(), device, torch.get_device_module(device).get_rng_state() if device else None


def set_rng_state(state: RngState) -> None:
    """Go back, or on, to a state from `rng_state`."""
    if len(state) == 2:
        state[0].set_state(state[1])
        return
    cpu, device, on_device = state
    torch.set_rng_state(cpu)
    if device is not None and on_device is not None:
        torch.get_device_module(device).set_rng_state(on_device)


def _numpy_state() -> dict[str, Any] | None:
    """The state of NumPy's global generator, of any kind; None where NumPy is not imported.

    >>> import numpy
    >>> before = numpy.random.get_bit_generator()
    >>> numpy.random.set_bit_generator(numpy.random.PCG64(3))
    >>> with random_numbers_put_back():
    ...     drawn = numpy.random.rand()
    >>> drawn == numpy.random.rand()
    True
    >>> numpy.random.set_bit_generator(before)
    """
    numpy_random: Any = sys.modules.get("numpy.random")
    if not hasattr(numpy_random, "get_state"):  # while NumPy is being imported its module is there, and not yet whole
        return None
    state = numpy_random.get_state(legacy=False)
    numbers = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in state["state"].items()}
    return state | {"state": numbers}


def _set_numpy_state(state: dict[str, Any] | None) -> None:
    if state is not None:
        sys.modules["numpy.random"].set_state(state)


HOST_GENERATORS: dict[str, Access] = {
    "Python": (random.getstate, random.setstate),
    "NumPy": (_numpy_state, _set_numpy_state),
}


def access_to(read: Callable[[], torch.Tensor], write: Callable[[torch.Tensor], object]) -> Access:
    """The access to a generator of torch, by functions that read its state as a tensor, and set it."""
    return lambda: bytes_of(read()), lambda state: write(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def generators(device: torch.device) -> dict[str, Access]:
    """The global generators that a model on `device` may draw from, by name."""
    of_torch = {"torch": access_to(torch.get_rng_state, torch.set_rng_state)}
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        of_torch[device.type] = access_to(
            partial(module.get_rng_state, device), lambda state: module.set_rng_state(state, device)
        )
    return of_torch | HOST_GENERATORS


@contextmanager
def random_numbers_put_back(device: torch.device | str = "cpu") -> Iterator[None]:
    """Draws from the global `generators` of `device` within it are made again after it.

    >>> with random_numbers_put_back():
    ...     drawn = random.random(), torch.rand(1)
    >>> drawn == (random.random(), torch.rand(1))
    True
    """
    before = [(write, read()) for read, write in generators(torch.device(device)).values()]
    try:
        yield
    finally:
        for write, state in before:
            write(state)


def seed_all(seed: int, step: int = 0, data_rank: int = 0, tp_group: int = 0) -> None:
    """Seed every generator that a model may draw from.

    Args:
        seed, step: of the run, and the number of the step plus one; 0: before training.
        data_rank: ranks of one number read the same samples, and draw alike from Python and NumPy, from which models
            make choices (tokens to mask, layers to leave out).
        tp_group: ranks of one number compute the same, and draw alike from torch. Others have other tokens or layers.
    """
    start = (seed * 1_000_003 + step) * 1_000_003
    torch.manual_seed((start + tp_group) % 2**63)
    mixed = start + data_rank
    random.seed(mixed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed % 2**32)
