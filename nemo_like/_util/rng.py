"""Generators of random numbers: torch's of the CPU and of the accelerator in use, and those that models draw from."""

import random
import sys
from functools import cache

import torch

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
