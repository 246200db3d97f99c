"""Activation checkpointing of the layers found in a model, as a `CheckpointConfig` says; with no process group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from nemo_like.activation_checkpointing import kv_sharing
from nemo_like.activation_checkpointing.policy import Policy, SelectivePolicy, named_ops_policy
from nemo_like.activation_checkpointing.regions import (
    CheckpointWrapper,
    apply_selective_checkpointing_to_layers,
    apply_submodule_checkpointing,
    checkpoint_layers,
    has_submodules_to_checkpoint,
)
from nemo_like.activation_checkpointing.sequential import apply_sequential_checkpointing
from nemo_like.cells import checkpoint_timestep_cells
from nemo_like.choice import choose_layers
from nemo_like.layers import Layer
from nemo_like.log import warn_once
from nemo_like.options import CheckpointConfig, MemoryBudget, parse_ac
from nemo_like.torch_compat import CheckpointWrapper as TorchCheckpointWrapper


def parse_checkpointing(ac: Any) -> tuple[CheckpointConfig, Policy | None]:
    """``ac=`` as a config and, where single ops are kept, the policy. A `Policy` object means ``selective`` with it.

    Raises:
        ValueError, TypeError: as `parse_ac`; and for a memory budget, which needs `parallelize` and a sample input.
    """
    if isinstance(ac, type):
        raise TypeError(f"ac is the class {ac.__name__}; it must be an object of it: ac={ac.__name__}().")
    own = ac if isinstance(ac, Policy) else None
    config = parse_ac("selective" if own is not None else ac)
    if isinstance(ac, CheckpointConfig) and not ac.enabled and ac != CheckpointConfig():
        warn_once(
            "A CheckpointConfig with settings was given, but its field enabled is False, the default: nothing is "
            "checkpointed. Set enabled=True."
        )
    if isinstance(config, MemoryBudget):
        raise ValueError(
            f"ac is {ac!r}, a memory budget: only nemo_like.parallelize and apply_activation_checkpointing can make a plan."
        )
    if own is not None:
        return config, own
    if config.mode != "selective":
        return config, None
    if config.ops_to_save is None:
        return config, SelectivePolicy()
    return config, named_ops_policy(config.ops_to_save)


def refuse_checkpointed(model: nn.Module) -> None:
    """Raise ValueError where something in `model` is checkpointed already, by us, PyTorch's wrapper or the model."""
    for name, module in model.named_modules():
        if isinstance(module, TorchCheckpointWrapper):
            raise ValueError(
                f"{name or 'The model'} is checkpointed already: a second wrapper would replay it twice. "
                "Apply checkpointing once, to a freshly built model."
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"{name or 'The model'} has its own gradient checkpointing on, and would be replayed twice. "
                "Call model.gradient_checkpointing_disable() first (in a Trainer: gradient_checkpointing=False)."
            )
        if getattr(module, "grad_checkpointing", False) is True:  # timm's word
            raise ValueError(
                f"{name or 'The model'} has its own gradient checkpointing on (grad_checkpointing=True), and would be "
                "replayed twice. Call model.set_grad_checkpointing(False) first."
            )


def checkpoint_found(
    model: nn.Module,
    chosen: Iterable[Layer],
    config: CheckpointConfig,
    policy: Policy | None,
    *,
    compile: bool = False,
    saved_bytes: Mapping[str, int] | None = None,
) -> list[nn.Module]:
    """Checkpoint `chosen` layers of `model` as `config` says; the layers as they are registered afterwards.

    `saved_bytes`, measured activation bytes by layer name, decide what is above the config's threshold and balance
    the segments of ``"sequential"``.
    """
    narrowed = tuple(chosen)
    if config.mode == "none":
        return [layer.module for layer in narrowed]
    if config.snn_timestep_checkpoint:
        checkpoint_timestep_cells(model, config)
        return []
    narrowed = choose_layers(model, narrowed, config, saved_bytes)
    if not narrowed:
        return []
    modules = [layer.module for layer in narrowed]
    through_cache = kv_sharing.has_kv_sharing(model) and not kv_sharing.shares_states_explicitly(modules)
    mode = config.mode
    if mode in ("full", "sequential") and through_cache:
        warn_once(
            f"ac={mode!r} was asked for, but this model's layers share keys and values through the cache, which a "
            "replayed attention would write twice: checkpointing MLPs and norms only."
        )
        mode = "submodule"
    if mode == "full":
        checkpoint_layers(
            model,
            modules,
            lambda layer, name: CheckpointWrapper(layer, config.use_reentrant, config.preserve_rng_state, name=name),
        )
    elif mode == "selective":
        apply_selective_checkpointing_to_layers(
            model, modules, through_cache, compile, policy=policy, preserve_rng_state=config.preserve_rng_state
        )
    elif mode == "submodule":
        apply_submodule_checkpointing(
            _with_submodules(modules),
            through_cache,
            use_reentrant=config.use_reentrant,
            preserve_rng_state=config.preserve_rng_state,
        )
    elif mode == "sequential":
        weights = None if saved_bytes is None else [saved_bytes.get(layer.fqn, 0) for layer in narrowed]
        apply_sequential_checkpointing(
            model, modules, config.sequential_segments, weights=weights, preserve_rng_state=config.preserve_rng_state
        )
    if not through_cache:
        kv_sharing.call_without_cache(model)
    return modules


def _with_submodules(layers: list[nn.Module]) -> list[nn.Module]:
    """`layers` without those that have nothing to checkpoint one by one (a speech model's first convolutions).

    Where that is all of them, all are returned, and refused by name further on.
    """
    fit = [layer for layer in layers if has_submodules_to_checkpoint(layer)]
    if not fit or len(fit) == len(layers):
        return layers
    names = ", ".join(dict.fromkeys(type(layer).__name__ for layer in layers if layer not in fit))
    warn_once(f"ac='submodule' was asked for; {names} has no MLP, attention or norm sub-module and keeps its activations.")
    return fit
