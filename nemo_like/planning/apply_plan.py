"""A plan put into a model by itself, for callers who own the order of the steps."""

from __future__ import annotations

from torch import nn

from nemo_like.activation_checkpointing.apply import apply_specs
from nemo_like.activation_checkpointing.engine.transfer import Transfer
from nemo_like.activation_checkpointing.plan import Plan, plan_specs
from nemo_like.distributed.launch import pick_device_type


def apply_plan(
    model: nn.Module,
    plan: Plan,
    *,
    device_type: str | None = None,
    transfer: Transfer | None = None,
    compile: bool = False,
) -> nn.Module:
    """Wrap `model`'s layers as `plan` says, in place, and return it. Call it before compiling and sharding.

    As with every other mode, the model is called without a key/value cache where gradients are on.

    Args:
        model: the bare model that the plan was made for.
        plan: from `plan_for` or `Plan.load`.
        device_type: ``"cpu"`` or ``"cuda"``, where the model will run; default: CUDA if there is any. Where the plan was
            traced for the other one, that is logged.
        transfer: moves outputs that wait in host memory; default: synchronous copies.
        compile: `nemo_like.compile.compile_layers` will be called afterwards.

    Raises:
        PlanError: the plan was made for another model. TypeError: a layer is checkpointed already. The model is
            unchanged then.
    """
    specs = plan_specs(model, plan, device_type or pick_device_type(), transfer)
    apply_specs(model, specs, compile=compile)
    return model
