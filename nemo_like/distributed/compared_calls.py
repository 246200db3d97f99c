"""Calls of a model for a comparison alone: in evaluation mode, and the model is afterwards as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from nemo_like.distributed.tensor.shared_random import generators
from nemo_like.losses.model_loss import chunked_in_evaluation

_PLAIN = int | float | str | None


@contextlib.contextmanager
def as_it_was(*models: nn.Module) -> Iterator[None]:
    """Within it, `models` are called for a comparison: in evaluation mode, without gradients, and uncompiled, or layers
    would be compiled for other lengths. Random numbers, buffers and plain attributes are put back after."""
    device = next((parameter.device.type for model in models for parameter in model.parameters()), "cpu")
    states = generators(device)
    before = {name: read() for name, (read, _) in states.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for model in models:
            stack.enter_context(chunked_in_evaluation(model))
            stack.enter_context(evaluating(model))
        try:
            yield
        finally:
            for name, (_, write) in states.items():
                write(before[name])


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it, `model` is in evaluation mode; its buffers and plain attributes are put back after."""
    with put_back(model):
        model.eval()
        yield


@contextlib.contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """The buffers and plain attributes of `model` are put back after it."""
    plain = [
        (attributes, {k: v for k, v in attributes.items() if isinstance(v, _PLAIN)})
        for attributes in map(vars, model.modules())
    ]
    slots = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = [
        (buffer, buffer._version, buffer.detach().clone())
        for buffer in model.buffers()
        if not (buffer.is_meta or buffer.is_inference())
    ]
    try:
        yield
    finally:
        for attributes, values in plain:
            attributes.update(values)  # `training`, too
        for own_buffers, saved in slots:
            own_buffers.update(saved)
        with torch.no_grad():
            for buffer, version, copy in buffers:
                if buffer._version != version:
                    buffer.copy_(copy)
