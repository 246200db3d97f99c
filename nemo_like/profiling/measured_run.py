"""Run a model for measurement and restore it: gradients, buffers, training flags and random state."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def preserved_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within: `model` is in training mode with zero gradients of its own. After: everything is as it was before.

    What comes back, also after an exception: each parameter's ``.grad`` (the very object, never written to), each
    buffer (the very object with its values), each module's training flag, and the random state of Python, of the CPU
    and of `device`. Parameters are not copied, because forward and backward do not change them.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    training = [(module, module.training) for module in model.modules()]
    python_state = random.getstate()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            for parameter, _ in gradients:
                # Zeros rather than None: what accumulating gradients cost is then the same in every run.
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            model.train()
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, name, buffer, values in buffers:
            if getattr(module, name, None) is not buffer:
                setattr(module, name, buffer)
            if not torch.equal(buffer, values):
                with torch.no_grad():
                    buffer.copy_(values)
        for module, was_training in training:
            module.training = was_training
        random.setstate(python_state)
