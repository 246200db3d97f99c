"""Memory of this rank: of its device's allocator, or of the process."""

import resource
import sys

import torch


def memory_kind(device: torch.device) -> str:
    """Return the kind of memory that `memory_used` and `memory_peak` count on `device`."""
    if device.type != "cpu":
        return f"bytes of tensors in the {device.type.upper()} caching allocator"
    return "resident bytes of the whole process, interpreter and libraries included"


def memory_used(device: torch.device) -> int:
    """Bytes in use now on this rank; see `memory_kind`. On a system without /proc it is the peak."""
    if device.type != "cpu":
        return torch.get_device_module(device).memory_allocated(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # macOS has no /proc
        return memory_peak(device)


def memory_peak(device: torch.device) -> int:
    """The most bytes in use so far on this rank; see `memory_kind`."""
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes
