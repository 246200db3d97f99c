"""Settings of this process's `Accelerator`, by whichever way accelerate was told: its config file, plugins, arguments.

`accelerate launch` hands its config file on in the environment; an `Accelerator` reads it there. Trainers make one.
"""

import sys
from dataclasses import dataclass
from typing import Any

from torch.distributed.fsdp import MixedPrecisionPolicy

from nemo_like.options import FSDP2


@dataclass(frozen=True)
class AccelerateSettings:
    """The settings of this process's `Accelerator` that checkpointing and the loss meet; the defaults: there is none."""

    # It will put PyTorch's checkpoint wrapper around each layer (``fsdp_activation_checkpointing``).
    checkpoints: bool = False
    compiler: str | None = None  # The back end that it compiles with (``dynamo_backend``); None: it does not.
    # It compiles each layer, and the modules outside the layers, instead of the whole model.
    by_regions: bool = False
    # ``"bf16"`` or ``"fp16"``: the autocast that it runs the model's forward under.
    precision: str | None = None
    shards: FSDP2 | None = None  # The options with which it shards the model by FSDP2; None: it does not.
    # The dtypes with which FSDP2 computes and reduces; None: those of the parameters.
    policy: MixedPrecisionPolicy | None = None
    not_planned: str = ""  # A setting of FSDP2 that no plan is made of.
    units: tuple[str, ...] | None = None  # Names of the classes of its units; None: those that the model declares.
    other_sharding: str = ""  # Name of another way to shard: DeepSpeed, FSDP1, Megatron-LM.


def accelerate_settings() -> AccelerateSettings:
    """Return the settings of this process's `Accelerator`; the defaults before one is made, or without accelerate."""
    module = sys.modules.get("accelerate.state")  # an `Accelerator` has imported it
    if module is None or not module.is_initialized():
        return AccelerateSettings()
    state = module.AcceleratorState()
    dynamo = state.dynamo_plugin
    backend = str(getattr(dynamo.backend, "value", dynamo.backend)).lower()
    plugin: Any = getattr(state, "fsdp_plugin", None)
    kind = str(getattr(state.distributed_type, "value", ""))
    shards, not_planned = None, ""
    if plugin is not None and kind == "FSDP" and getattr(plugin, "fsdp_version", 1) == 2:
        shards = FSDP2(
            reshard_after_forward=plugin.reshard_after_forward,
            cpu_offload=type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
        )
        policy = getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy)
        if plugin.ignored_modules is not None:
            not_planned = "fsdp_ignored_modules, whose parameters are whole on each rank"
        elif getattr(policy, "__name__", "") != "transformer_auto_wrap_policy":
            not_planned = "fsdp_auto_wrap_policy other than TRANSFORMER_BASED_WRAP"
    others = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "FSDP": "" if shards else "FSDP1"}
    return AccelerateSettings(
        # Read only where FSDP runs: elsewhere accelerate makes no use of it.
        checkpoints=bool(getattr(plugin, "activation_checkpointing", False)),
        compiler=None if backend == "no" else backend,
        by_regions=bool(getattr(dynamo, "use_regional_compilation", False)),
        precision=state.mixed_precision if state.mixed_precision in ("bf16", "fp16") else None,
        shards=shards,
        policy=plugin.mixed_precision_policy if shards else None,
        not_planned=not_planned,
        units=plugin.transformer_cls_names_to_wrap if shards else None,
        other_sharding=others.get(kind, ""),
    )
