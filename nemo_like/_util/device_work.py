"""Waiting for a device, and the errors of its memory."""

import torch

TRIED = "CUDA (ROCm included) and CPUs"


def check_kind(kind: str) -> None:
    """Raise ValueError where torch has no streams or no properties for devices of that kind, such as ``"mps"``."""
    module = torch.get_device_module(kind)
    lacks = [name for name in ("Stream", "get_device_properties") if kind != "cpu" and not hasattr(module, name)]
    if lacks:
        raise ValueError(
            f"device is {kind!r}, and torch.{kind} has no {lacks[0]}, which offloading and plans require. Training was "
            f"tried on {TRIED} alone: use device='cpu'."
        )


def wait_for(device: torch.device) -> None:
    """Block the host until all work that `device` was given is done; the CPU's is done when it returns."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`. The host does not wait for an accelerator: it copies from page-locked memory later on."""
    is_far = tensor.device.type == "cpu" and device.type not in ("cpu", "meta")
    return (tensor.pin_memory() if is_far else tensor).to(device, non_blocking=True)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether memory ran out. The CPU's allocator has no error class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)
