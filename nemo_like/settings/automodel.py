"""The table of NeMo Automodel's YAML."""

from collections.abc import Iterator
from typing import Any

from nemo_like.settings.formats import (
    DTYPE,
    SCHEDULE,
    UNKNOWN,
    WHOLE,
    Format,
    ValueKind,
    cut_batch,
    only,
    preset,
    switch,
    whole,
    words,
)


def _finish(values: dict[str, Any]) -> Iterator[str]:
    packed = values.pop("_packed", None)
    if packed:
        values["seq_len"] = packed
    if values.pop("_fp8", False):
        values["precision"] = values.pop("_recipe", "fp8")
    values.pop("_recipe", None)
    if values.pop("_four_bit", False):
        if "lora" not in values:
            yield "quantization.load_in_4bit = True (without peft)"
        else:
            values["four_bit"] = True
    cut_batch(values)


_UNSET = ("none", "None", -1, 0)
_POLICY = "distributed.mp_policy."
_OPTIMIZERS = {"torch.optim.adamw": "adamw", "torch.optim.adam": "adamw", "torch.optim.sgd": "sgd"}
_LOSSES = {
    "nemo_automodel.components.loss.masked_ce.maskedcrossentropy": "model",
    "nemo_automodel.components.loss.linear_ce.fusedlinearcrossentropy": "chunked",
}
# Keys: nemo_automodel/recipes/_dist_setup.py and its examples. Defaults: `_PARALLELISM_DEFAULTS` there, and
# `FSDP2Config` in nemo_automodel/components/distributed/config.py.
TABLE = Format(
    framework="NeMo Automodel",
    marks=("step_scheduler", "distributed"),
    keys={
        "model.pretrained_model_name_or_path": ("model", ValueKind(preset)),
        "model.torch_dtype": ("dtype", DTYPE),
        "step_scheduler.global_batch_size": ("global_batch", WHOLE),
        "step_scheduler.local_batch_size": ("batch_size", WHOLE),
        "packed_sequence.packed_sequence_size": ("_packed", whole(0)),
        "dataset.seq_len": ("seq_len", WHOLE),
        "dataset.seq_length": ("seq_len", WHOLE),
        "distributed.strategy": ("", only("fsdp2")),
        "distributed._target_": ("", ValueKind(lambda value: None if "FSDP2" in value else UNKNOWN)),
        "distributed.dp_size": ("_data_ranks", whole(*_UNSET)),
        "distributed.dp_replicate_size": ("dp_replicate", whole(*_UNSET)),
        "distributed.tp_size": ("tp", whole(*_UNSET)),
        "distributed.cp_size": ("cp", whole(*_UNSET)),
        "distributed.pp_size": ("pp", whole(*_UNSET)),
        "distributed.ep_size": ("ep", whole(*_UNSET)),
        "distributed.sequence_parallel": ("sequence_parallel", switch()),
        "distributed.activation_checkpointing": (
            "ac",
            words({True: "full", False: "none", "full": "full", "selective": "selective"}),
        ),
        "distributed.reshard_after_forward": ("reshard_after_forward", switch("yes", "no")),
        "distributed.enable_compile": ("compile", switch("inductor", None)),
        "distributed.enable_async_tensor_parallel": ("async_tp", switch()),
        "distributed.enable_fsdp2_prefetch": ("", only(False)),
        f"{_POLICY}param_dtype": ("precision", DTYPE),
        f"{_POLICY}reduce_dtype": ("reduce_dtype", DTYPE),
        "distributed.offload_policy._target_": ("cpu_offload", ValueKind(lambda value: "CPUOffloadPolicy" in value)),
        "distributed.pipeline.pp_schedule": ("pp_schedule", SCHEDULE),
        "distributed.pipeline.pp_microbatch_size": ("_part", WHOLE),
        "peft.dim": ("lora", WHOLE),
        "peft.match_all_linear": ("", only(True)),
        "quantization.load_in_4bit": ("_four_bit", switch()),
        "quantization.bnb_4bit_use_double_quant": ("", only(True)),
        "optimizer._target_": ("optimizer", words(_OPTIMIZERS)),
        "loss_fn._target_": ("loss", words(_LOSSES)),
        "compile.enabled": ("compile", switch("inductor", None)),
        "fp8.enabled": ("_fp8", switch()),
        "fp8.recipe_name": ("_recipe", words({"tensorwise": "fp8", "rowwise": "fp8-rowwise"})),
    },
    ignored=(
        *(
            "recipe",
            "recipe.*",
            "seed",
            "rng.*",
            "dist_env.*",
            "checkpoint.*",
            "logger.*",
            "wandb.*",
            "mlflow.*",
            "ci.*",
        ),
        *("step_scheduler.*", "dataset.*", "dataloader.*", "validation_*", "lr_scheduler.*", "benchmark.*"),
        *("model._target_", "model.config._target_", "model.trust_remote_code", "peft._target_", "peft.alpha"),
        *("peft.dropout*", "peft.use_triton", "optimizer.*", "clip_grad_norm.*", f"{_POLICY}_target_"),
        *("loss_fn.*", "quantization.bnb_4bit_*", "packed_sequence.*", "fp8.*", "compile.*", f"{_POLICY}output_dtype"),
        *(f"{_POLICY}cast_forward_inputs", "distributed.offload_policy.pin_memory"),
        *(
            "distributed.pipeline.scale_grads_in_schedule",
            "distributed.pipeline._target_",
            "distributed.pipeline.dtype",
        ),
    ),
    implied={
        f"{_POLICY}param_dtype": "bfloat16",
        f"{_POLICY}reduce_dtype": "float32",
        "distributed.activation_checkpointing": False,
        "distributed.sequence_parallel": False,
        **{f"distributed.{axis}_size": 1 for axis in ("tp", "cp", "pp", "ep")},
    },
    renamed=(
        (r"^autopipeline\.", "distributed.pipeline."),
        (r"^distributed_config\.", "distributed."),
        (r"^parallelizer\.activation_checkpointing$", "distributed.activation_checkpointing"),
        (r"^model\.config\.pretrained", "model.pretrained"),
    ),
    finish=_finish,
)
