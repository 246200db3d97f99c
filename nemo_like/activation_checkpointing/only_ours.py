"""Nobody else replays what we replay: found at the call that would switch it on, or else at the next forward.

Whoever checkpoints a model after us (a trainer's setting, accelerate's, the model's own) nests one replay in another:
everything is computed twice more, and what our policy keeps has no effect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nemo_like.activation_checkpointing.nameless import Nameless
from nemo_like.module_tree import every_module
from nemo_like.torch_compat import CheckpointWrapper as TorchCheckpointWrapper

FLAGS = ("gradient_checkpointing", "grad_checkpointing")
"""What models call their own checkpointing: transformers, timm."""


def second_replay(where: str, flag: str) -> ValueError:
    """The error for a module that is checkpointed by us and has its own checkpointing switched on."""
    return ValueError(
        f"{where}.{flag} is True, and regions of nemo_like are in the model: it would be replayed twice. Use one of the "
        "two: leave gradient checkpointing off (model.gradient_checkpointing_disable(), set_grad_checkpointing(False), "
        "in a Trainer gradient_checkpointing=False), or ac='none'."
    )


def watch_for_others(model: nn.Module) -> None:
    """Have `model`, and each module below it that holds a list of regions, look before its forwards."""
    holders = [model]
    for module in model.modules():
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList | nn.Sequential)]
        if module is not model and any(
            isinstance(m, TorchCheckpointWrapper) for some in lists for m in every_module(some)
        ):
            holders.append(module)
    for module in holders:
        if not any(isinstance(hook, _OnlyOurs) for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(_OnlyOurs())


class _OnlyOurs:
    """A forward pre-hook (a class of the module's, so that a model with it can be copied and pickled)."""

    def __init__(self) -> None:
        self._flagged: list[tuple[nn.Module, str]] | None = None

    def __call__(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if self._flagged is None:  # the first forward: by now, whoever prepares a model has done it
            _refuse_nested(module)
            self._flagged = [(inner, name) for inner in module.modules() for name in FLAGS if hasattr(inner, name)]
        for inner, name in self._flagged:
            if inner.training and getattr(inner, name) is True:
                raise second_replay(type(inner).__name__, name)


def _refuse_nested(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, TorchCheckpointWrapper):
            continue
        kinds = {
            issubclass(type(m), Nameless) for m in every_module(module) if issubclass(type(m), TorchCheckpointWrapper)
        }
        if len(kinds) == 2:  # ours, and somebody else's
            raise ValueError(
                f"PyTorch's checkpoint_wrapper was put around or into {name or 'the model'} after nemo_like had "
                "checkpointed it (accelerate does that for fsdp_activation_checkpointing: true, and for "
                "FullyShardedDataParallelPlugin(activation_checkpointing=True)): two wrappers nest, and what ac= keeps "
                "would have no effect. Switch that off, or use ac='none'."
            )
