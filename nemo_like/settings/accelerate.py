"""The table of the YAML that ``accelerate config`` writes."""

from collections.abc import Iterator
from typing import Any

from nemo_like.settings.formats import ROTATION, WHOLE, Format, ValueKind, only, switch, words

SHARDING: dict[str, tuple[str, ValueKind]] = {
    "fsdp_config.fsdp_version": ("", only(2)),
    "fsdp_config.fsdp_reshard_after_forward": ("reshard_after_forward", switch("yes", "no")),
    "fsdp_config.fsdp_offload_params": ("cpu_offload", switch()),
    "fsdp_config.fsdp_activation_checkpointing": ("ac", switch("full", "none")),
    "fsdp_config.fsdp_activation_checkpointing_offload": ("offload", switch("boundary", "none")),
    "fsdp_config.fsdp_auto_wrap_policy": ("", only("TRANSFORMER_BASED_WRAP")),
    "fsdp_config.fsdp_sharding_strategy": ("", only("FULL_SHARD", 1)),
    "fsdp_config.fsdp_forward_prefetch": ("", only(False)),
}
NOT_READ = tuple(
    f"fsdp_config.fsdp_{name}"
    for name in (
        *("state_dict_type", "final_state_dict_type", "cpu_ram_efficient_loading", "sync_module_states"),
        *("use_orig_params", "transformer_layer_cls_to_wrap", "limit_all_gathers", "backward_prefetch*"),
    )
)
RENAMED = ((r"^fsdp_config\.(?!fsdp_)", "fsdp_config.fsdp_"),)


def reduce_alike(values: dict[str, Any]) -> None:
    """Set the dtype to reduce in, which is that of the policy of ``mixed_precision`` to compute in."""
    if values.get("precision") in ("bf16", "fp16"):
        values["reduce_dtype"] = values["precision"]


def _finish(values: dict[str, Any]) -> Iterator[str]:
    reduce_alike(values)
    shard, ranks = values.get("dp_shard"), values.get("world_size")
    divided = (shard or 1) * values.get("dp_replicate", 1) * values.get("tp", 1) * values.get("cp", 1)
    if shard and ranks not in (None, divided):
        yield f"num_processes = {ranks} (parallelism_config divides {divided})"
        values["world_size"] = divided


def _prepare(values: dict[str, Any]) -> None:
    if values.get("reduce_dtype") == {"bf16": "bf16", "fp16": "fp16"}.get(values.get("precision", ""), "fp32"):
        del values["reduce_dtype"]
    values.setdefault("precision", "fp32")
    if values.get("reshard_after_forward") == "default":
        values["reshard_after_forward"] = "yes"
    if values.get("cp", 1) == 1:
        values.pop("cp_method", None)


_SIZES = "parallelism_config.parallelism_config_"
# Keys: the options of ``accelerate launch`` in accelerate/commands/launch.py. Defaults, and the dtype that ``bf16``
# reduces in: `FullyShardedDataParallelPlugin`, of version 2, in accelerate/utils/dataclasses.py.
TABLE = Format(
    framework="accelerate",
    marks=("compute_environment", "distributed_type"),
    keys={
        "distributed_type": ("", only("FSDP")),
        "num_processes": ("world_size", WHOLE),
        "mixed_precision": (
            "precision",
            words({"no": "fp32", False: "fp32"} | {word: word for word in ("bf16", "fp16", "fp8")}),
        ),
        "fp8_config.backend": ("", only("AO", "ao")),
        "dynamo_config.dynamo_backend": ("compile", words({"INDUCTOR": "inductor", "NO": None, False: None})),
        f"{_SIZES}dp_replicate_size": ("dp_replicate", WHOLE),
        f"{_SIZES}dp_shard_size": ("dp_shard", WHOLE),
        f"{_SIZES}tp_size": ("tp", WHOLE),
        f"{_SIZES}cp_size": ("cp", WHOLE),
        f"{_SIZES}sp_size": ("", only(1)),
        f"{_SIZES}cp_comm_strategy": ("cp_method", ROTATION),
        **SHARDING,
    },
    ignored=(
        *NOT_READ,
        *("compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank", "main_*", "rdzv_*"),
        *("num_machines", "same_network", "tpu_*", "use_cpu", "gpu_ids", f"{_SIZES}sp_*", f"{_SIZES}cp_backend"),
        *("dynamo_config.dynamo_mode", "dynamo_config.dynamo_use_*"),
    ),
    implied={"fsdp_config.fsdp_reshard_after_forward": True},
    renamed=RENAMED,
    finish=_finish,
    prepare=_prepare,
    fixed={
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "num_machines": 1,
        "machine_rank": 0,
        "fsdp_config.fsdp_version": 2,
        "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
)
