"""Waiting for a device, and the errors of its memory."""

import torch


def wait_for(device: torch.device) -> None:
    """Block the host until all work that `device` was given is done; the CPU's is done when it returns."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether memory ran out. The CPU's allocator has no error class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)
