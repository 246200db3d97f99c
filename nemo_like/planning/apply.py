"""Carrying a plan out: each planned layer becomes a region with its own decision table."""

from __future__ import annotations

from typing import Any

from torch import nn

from nemo_like.activation_checkpointing.kv_sharing import call_without_cache
from nemo_like.activation_checkpointing.regions import CheckpointWrapper, checkpoint_layers
from nemo_like.layers.names import bare_modules
from nemo_like.planning.plan import Plan


def apply_plan(model: nn.Module, plan: Plan, *, device_type: str | None = None, transfer: Any = None) -> nn.Module:
    """Wrap `model`'s layers as `plan` says, in place, and return it. Call it before sharding.

    As with every other mode, the model is called without a key/value cache where gradients are on.

    Args:
        model: the bare model that the plan was made for.
        plan: from `plan_for` or `Plan.load`.
        device_type: ``"cpu"`` or ``"cuda"``, where the model will run; default: CUDA if there is any. Attention is
            another op on each.
        transfer: moves outputs that wait in host memory; default: synchronous copies.

    Raises:
        PlanError: the plan was made for another model. The model is unchanged then.
        TypeError: a layer is checkpointed already. The model is unchanged then.
    """
    plan.check(model)
    policies = {name: policy for name, policy in plan.policies(device_type).items() if policy is not None}
    modules = dict(bare_modules(model))
    chosen: list[nn.Module] = []
    by_module = {}
    for name, policy in policies.items():
        if id(modules[name]) not in by_module:
            by_module[id(modules[name])] = (name, policy)
            chosen.append(modules[name])

    def wrap(layer: nn.Module, _: str) -> CheckpointWrapper:
        name, policy = by_module[id(layer)]
        return CheckpointWrapper(layer, policy=policy, name=name, transfer=transfer)

    checkpoint_layers(model, chosen, wrap)
    call_without_cache(model)
    return model
