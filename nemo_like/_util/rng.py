"""torch's generators of random numbers: that of the CPU, and that of the accelerator that this process uses."""

from __future__ import annotations

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


@cache  # what a machine has doesn't change, and this is asked for every region
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
    """Go back, or on, to what `rng_state` returned."""
    if len(state) == 2:
        state[0].set_state(state[1])
        return
    cpu, device, on_device = state
    torch.set_rng_state(cpu)
    if device is not None and on_device is not None:
        torch.get_device_module(device).set_rng_state(on_device)
