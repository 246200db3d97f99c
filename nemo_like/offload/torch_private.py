"""The three private names of PyTorch that offloading reads, each with what happens where it is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nemo_like.log import warn_once


def version_of(tensor: torch.Tensor) -> int | None:
    """How often `tensor`, or a tensor that shares its version counter, was changed in place.

    None where nothing is counted (inference tensors, or a torch without the name): an in-place change of such a
    tensor cannot be noticed, as autograd itself does not notice it.
    """
    if tensor.is_inference():
        return None
    return getattr(tensor, "_version", None)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `tensor` is a differentiable view of; None for no view."""
    return getattr(tensor, "_base", None)


def innermost_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The (pack, unpack) pair that saved tensors go to at this point; None for none, or where torch cannot tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:
        warn_once("This torch cannot tell which saved-tensor hooks are active: offloading inside a checkpointed region "
                  "is then refused only where the modules show it.")  # fmt: skip
        return None
    return top(False)
