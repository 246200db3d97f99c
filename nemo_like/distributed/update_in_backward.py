"""The optimizer's step of each parameter in backward, as soon as its gradient is there."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nemo_like._util.module_tree import check_model
from nemo_like._util.words import did_you_mean
from nemo_like.distributed.unit_calls import STEPS_LATER
from nemo_like.distributed.weights.tensor_locations import show_shards


class OptimizerInBackward:
    """The optimizers of `optimizer_in_backward`, one for each parameter."""

    def __init__(self, optimizers: dict[str, torch.optim.Optimizer]) -> None:
        # By the name of the parameter: for a schedule of learning rates, as an example.
        self.optimizers = optimizers
        self._hooks = [
            param.register_post_accumulate_grad_hook(functools.partial(_step_with, optimizer))
            for optimizer in optimizers.values()
            for param in optimizer.param_groups[0]["params"]
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer, by the name of its parameter."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`.

        Raises:
            ValueError: it is of other parameters; nothing is loaded.
        """
        for name in self.optimizers.keys() ^ state_dict.keys():
            where = "has no state for" if name in self.optimizers else "has a state for"
            close = did_you_mean(name, tuple(self.optimizers))
            raise ValueError(f"state_dict {where} {name!r}; it must be of the same parameters that train.{close}")
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state_dict[name])

    def remove(self) -> None:
        """Step no more in backward: gradients stay from now on."""
        for hook in self._hooks:
            hook.remove()


def optimizer_in_backward(
    model: nn.Module, build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> OptimizerInBackward:
    """Step each parameter in backward, as soon as its gradient is there, and free the gradient.

    The gradients of the whole model are never in memory together. The weights are those that the loop with
    ``optimizer.step()`` behind backward makes, bit by bit. A tied weight is stepped once, one without a gradient not at all;
    one that this rank does not use is stepped at the end of backward, if another rank uses it.
    Every backward is a whole step: gradients cannot be accumulated over micro-batches, nor clipped by their global norm.
    The loop calls neither ``step()`` nor ``zero_grad()``. Predict it with ``StepSpec(in_backward=True)``.

    Args:
        model: with its weights, behind `nemo_like.parallelize` (FSDP2, or one rank).
        build: makes the optimizer of a list of one parameter: ``functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)``.

    Raises:
        TypeError: `model` is not a module. ValueError: it is a `DistributedDataParallel`, which sums gradients later.

    >>> model = nn.Linear(2, 2)
    >>> handle = optimizer_in_backward(model, functools.partial(torch.optim.SGD, lr=0.1))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> model.weight.grad is None, list(handle.state_dict())
    (True, ['weight', 'bias'])
    """
    check_model(model)
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "model is a DistributedDataParallel, which sums gradients over the ranks behind the hooks of parameters. Use "
            "strategy='fsdp2'."
        )
    show_shards(model)
    return OptimizerInBackward({name: build([p]) for name, p in model.named_parameters() if p.requires_grad})


def _step_with(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> None:
    later: list[Callable[[], None]] | None = vars(param).get(STEPS_LATER)
    if later is not None:
        later.append(functools.partial(_step, optimizer, param))
    else:
        _step(optimizer, param)


def _step(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> None:
    optimizer.step()
    param.grad = None
