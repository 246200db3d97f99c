"""Waiting for a device."""

from __future__ import annotations

import torch


def wait_for(device: torch.device) -> None:
    """Block the host until all work that `device` was given is done; the CPU's is done when it returns."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
