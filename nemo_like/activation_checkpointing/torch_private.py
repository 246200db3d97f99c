"""Adapters: the private names of torch that the engine uses, each with what happens where it is absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Where it is absent, an autograd node of our own does the same.
_make_saved_tensor: Callable[..., Any] | None = getattr(torch._C._autograd, "_make_saved_tensor", None)

_keep_graph: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
_graph_task: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)
_functorch_level: Callable[[], Any] | None = getattr(
    getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None
)


class _SaveInput(torch.autograd.Function):
    """A node that does nothing but keep a tensor the way autograd keeps one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        raise AssertionError("no gradient flows through a saved input")


def save_tensor(tensor: Tensor) -> Callable[[], Tensor]:
    """Have autograd save `tensor`, hooks and version check included; the result gives it back."""
    if _make_saved_tensor is not None:
        return _make_saved_tensor(tensor, is_output=False).unpack
    node = _SaveInput.apply(torch.empty(0, requires_grad=True), tensor).grad_fn
    return lambda: node.saved_tensors[0]


def graph_is_kept() -> bool | None:
    """Whether the backward that runs now was started with ``retain_graph=True``; None: unknown, or none runs."""
    if _keep_graph is None or (_graph_task is not None and _graph_task() == -1):
        return None
    return _keep_graph()


def in_functorch_transform() -> bool:
    """Whether a `torch.func` transform is active; False where torch does not tell."""
    return _functorch_level is not None and _functorch_level() is not None


def unwaited_collectives() -> int:
    """How many functional collectives of this process are under way and not yet waited for; 0 where torch can't tell."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0
    count = getattr(torch._C._distributed_c10d, "_get_work_registry_size", None)
    return 0 if count is None else count()
