"""Parameters that would train wrongly without a word.

Those that sharding took out of a model, in an optimizer that was built before; and those that were frozen when the model was
made ready, and whose gradients no rank reduces.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nemo_like._util.module_tree import bare_name

_Reference = weakref.ref[nn.Parameter]
_replaced: dict[int, tuple[_Reference, str]] = {}
"""By id, what replaced parameters were called; empty again once nobody has any of them."""
_watching = False


def parameters_of(model: nn.Module) -> dict[str, _Reference]:
    """The parameters of `model` by their bare names, without keeping them alive."""
    return {bare_name(name): weakref.ref(parameter) for name, parameter in model.named_parameters()}


def watch_replaced(before: Mapping[str, _Reference], model: nn.Module) -> None:
    """Have the step of an optimizer raise that holds a parameter of `before` whose place in `model` another one has."""
    global _watching
    for name, parameter in model.named_parameters():
        reference = before.get(bare_name(name))
        old = None if reference is None else reference()
        if old is not None and old is not parameter:
            _remember(old, bare_name(name))
            del old
    if _replaced and not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_refuse_replaced)


def refuse_to_train(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Have the forward of `model` raise once one of `parameters`, frozen now and not reduced over ranks, is to train."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad and parameter.is_floating_point()]

    def check(module: nn.Module, _args: Any) -> None:
        if torch.is_grad_enabled() and any(map(attrgetter("requires_grad"), frozen)):
            name = next(n for n, p in module.named_parameters() if p.requires_grad and any(p is one for one in frozen))
            raise RuntimeError(
                f"{bare_name(name)} was frozen when parallelize() was called, and requires a gradient now, which would not "
                "be averaged over ranks. Freeze it after parallelize() instead, or use strategy='fsdp2' "
                "(FSDP2(frozen_sharding='per_layer') for a frozen tower), which shards it."
            )

    if frozen:
        model.register_forward_pre_hook(check)


def _remember(parameter: nn.Parameter, name: str) -> None:
    key = id(parameter)

    def forget(_: object) -> None:
        _replaced.pop(key, None)

    _replaced[key] = weakref.ref(parameter, forget), name


def _refuse_replaced(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if not _replaced:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = [_replaced[id(parameter)][1] for parameter in parameters if id(parameter) in _replaced]
    if names:
        raise RuntimeError(
            f"This {type(optimizer).__name__} has {len(names)} parameter(s) that parallelize() has replaced, "
            f"{names[0]!r} for one: it would train nothing. Build the optimizer after parallelize(), of the parameters "
            "that the model has then."
        )
