"""The table of the JSON of ``transformers.TrainingArguments`` and of TRL's classes, with our `CheckpointingArguments`."""

from collections.abc import Iterator
from typing import Any

from nemo_like.options.optimizers import TRAINER_OPTIMIZERS
from nemo_like.settings.accelerate import NOT_READ, reduce_alike
from nemo_like.settings.formats import DTYPE, UNKNOWN, WHOLE, Format, ValueKind, only, preset, switch, whole, words

# Words of ``fsdp`` that FSDP2 has a meaning for.
FSDP_WORDS = {"full_shard", "shard_grad_op", "offload", "auto_wrap"}
OURS = ("ac", "ac_scope", "loss", "cp", "offload")  # Fields of `CheckpointingArguments`.
# Fields that only TRL's classes have, or that have another default there.
TRLS = ("max_length", "gradient_checkpointing")
AXES = ("dp_replicate", "dp_shard", "tp", "cp")
OFFLOADS = ("boundary", "saved", "all")
HARMLESS_IF_OFF = """label_smoothing_factor use_liger_kernel auto_find_batch_size activation_offloading use_cache
    full_determinism load_in_4bit load_in_8bit fsdp_config.xla fsdp_config.min_num_params fsdp_config.forward_prefetch
    accelerator_config.split_batches"""
# Patterns of keys that change neither memory nor speed of a step.
NO_EFFECT = """fsdp_config.xla_* fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap accelerator_config.* ddp_*
    parallelism_config.*_backend parallelism_config.*_handler* liger_kernel_config.* peft_config.* *_strategy *eval*
    log* save* hub_* push_* load_best_* metric_for_* greater_is_better prediction_* include_* report_to run_name project
    trackio_* disable_tqdm output_dir overwrite_* do_* num_train_epochs max_steps learning_rate lr_* warmup_* adam_*
    weight_decay max_grad_norm average_tokens_* tf32 seed data_seed use_cpu no_cuda use_mps_device dataloader_* use_ipex
    enable_jit_* remove_unused_columns label_names group_by_length length_column_name ignore_data_skip debug local_rank
    restore_callback_* resume_from_* skip_memory_metrics tpu_* past_index mp_parameters ray_scope fp16_* _n_gpu
    half_precision_backend trust_remote_code model_revision chat_template_path dataset_* eos_token pad_token packing*
    check_memory padding_free pad_to_* truncation_mode shuffle_dataset completion_only_loss assistant_only_loss"""


def _fsdp_words(value: Any) -> tuple[str, ...] | None:
    """Read ``fsdp``: a yes, which transformers 5 writes, or words; None: the Trainer does not shard."""
    if isinstance(value, bool):
        return () if value else None
    if not isinstance(value, str | list):
        raise ValueError("it must be true, false, or words such as full_shard")
    return tuple(str(word).lower() for word in (value.split() if isinstance(value, str) else value)) or None


def _read_only(kind: ValueKind) -> ValueKind:
    """Return the kind of a key that is read, and not written."""
    return ValueKind(kind.read, lambda value: UNKNOWN)


def _unless(usual: Any) -> ValueKind:
    """Return the kind of a field that changes nothing with its `usual` value, and is not written with it."""
    return ValueKind(
        lambda value: None if value == usual else value, lambda value: UNKNOWN if value == usual else value
    )


def _finish(values: dict[str, Any]) -> Iterator[str]:
    half = "fp16" if values.pop("_fp16", False) else None
    if values.pop("_bf16", half is None and "seq_len" in values):  # TRL's default
        half = "bf16"
    values["precision"] = half or values.get("dtype", "fp32")
    checkpoints = {values.pop("_checkpoints", None)}
    sharding = values.pop("_fsdp", None)
    if sharding is None:
        for name in ("reshard_after_forward", "cpu_offload", "_fsdp_checkpoints"):
            values.pop(name, None)
    else:
        checkpoints.add(values.pop("_fsdp_checkpoints", None))
        values["strategy"] = "fsdp2"
        values.setdefault("reshard_after_forward", "no" if "shard_grad_op" in sharding else "yes")
        values.setdefault("cpu_offload", "offload" in sharding)
        reduce_alike(values)
        yield from (f"fsdp = {word}" for word in sharding if word not in FSDP_WORDS)
    if checkpoints != {None}:
        values.setdefault("ac", "full" if "full" in checkpoints else "none")
    if values.get("grad_accum", 1) > 1:
        values.setdefault("sync", "last")  # `Trainer` enters accelerate's `no_sync` for the others
    values["drop_output"] = True  # `compute_loss` returns the loss only


def _prepare(values: dict[str, Any]) -> None:
    precision, ranks = values["precision"], values["world_size"]
    half, shards = precision in ("bf16", "fp16"), ranks > 1 or values["cpu_offload"]
    if half or precision == values.get("dtype", "fp32"):
        values[f"_{values.pop('precision')}"] = True
        values["_bf16"] = precision == "bf16"
    if shards:
        values |= {"_fsdp": True, "_version": 2}
    if values["reshard_after_forward"] == "default":
        values["reshard_after_forward"] = "yes"
    if values["loss"] == "chunked" and values["compile"] != "none":
        values["compile (of each layer)"] = values.pop("compile")  # `torch_compile` is of the whole model and its loss
    if values["optimizer"] == "adamw-foreach":
        values["optimizer"] = "adamw"
    unneeded = {
        "reduce_dtype": ranks == 1 or values["reduce_dtype"] == (precision if half else "fp32"),
        "ac": values["ac"] == "none",  # the usual one of `CheckpointingArguments`, not of a job
        "reshard_after_forward": not shards,
        # All ranks, as the launcher starts them.
        "dp_shard": {values["dp_replicate"], values["tp"], values["pp"]} == {1},
        "sync": values["sync"] == "last" or 1 in (ranks, values["grad_accum"]),
        "drop_output": True,
    }
    for name, is_unneeded in unneeded.items():
        if is_unneeded:
            values.pop(name, None)


# Keys and defaults: transformers/training_args.py, where ``_process_fsdp_args`` makes accelerate's plugin, and
# trl/trainer/sft_config.py. Where `ac` is ours, the Trainer must not checkpoint too.
TABLE = Format(
    framework="transformers.Trainer",
    marks=("per_device_train_batch_size", "gradient_accumulation_steps"),
    keys={
        "per_device_train_batch_size": ("batch_size", WHOLE),
        "gradient_accumulation_steps": ("grad_accum", WHOLE),
        "max_length": ("seq_len", WHOLE),
        "bf16": ("_bf16", switch()),
        "fp16": ("_fp16", switch()),
        "optim": ("optimizer", words(TRAINER_OPTIMIZERS)),
        "torch_compile": ("compile", switch("inductor", None)),
        "torch_compile_backend": ("compile", _read_only(words({"inductor": "inductor"}))),
        "torch_compile_mode": ("", only("default")),
        "activation_checkpointing": ("_checkpoints", switch("full", "none")),
        "activation_checkpointing_kwargs.use_reentrant": ("", only(True, False)),
        "fsdp": ("_fsdp", ValueKind(_fsdp_words)),
        "fsdp_config.version": ("_version", ValueKind(only(2, "2").read)),
        "fsdp_config.reshard_after_forward": (
            "reshard_after_forward",
            words({True: "yes", False: "no", "full_shard": "yes", "shard_grad_op": "no"}),
        ),
        "fsdp_config.cpu_offload": ("cpu_offload", ValueKind(switch().read, _unless(False).write)),
        "fsdp_config.activation_checkpointing": ("_fsdp_checkpoints", switch("full", "none")),
        "fsdp_config.auto_wrap_policy": ("", only("TRANSFORMER_BASED_WRAP")),
        **{f"parallelism_config.{axis}_size": (axis, _read_only(WHOLE)) for axis in AXES},
        "parallelism_config.sp_size": ("", only(1)),
        "ac": ("ac", _unless("none")),
        "ac_scope": ("scope", _unless("all")),
        "loss": ("loss", words({"model": None, "chunked": "chunked"}, others=False)),
        "cp": ("cp", ValueKind(whole(1).read, _unless(1).write)),
        "offload": ("offload", words({"none": None} | {word: word for word in OFFLOADS}, others=False)),
        "loss_type": ("loss", _read_only(words({"nll": None, "chunked_nll": "chunked"}))),
        "peft_config.r": ("lora", _read_only(WHOLE)),
        "model_name_or_path": ("model", _read_only(ValueKind(preset))),
        "model_init_kwargs.dtype": ("dtype", _read_only(DTYPE)),
        "model_init_kwargs.attn_implementation": ("", only("flash_attention_2", "flash_attention_3", "sdpa")),
        "accelerator_config.gradient_accumulation_kwargs.sync_each_batch": ("sync", switch("every", "last")),
        **{name: ("", only(False)) for name in HARMLESS_IF_OFF.split()},
    },
    ignored=(*(pattern.replace("config.fsdp_", "config.") for pattern in NOT_READ), *NO_EFFECT.split()),
    implied={"per_device_train_batch_size": 8, "optim": "adamw_torch_fused"},
    renamed=(
        (r"^gradient_checkpointing", "activation_checkpointing"),
        (r"^fsdp_config\.fsdp_", "fsdp_config."),
        (r"^fsdp_config\.offload_params$", "fsdp_config.cpu_offload"),
        (r"^max_seq_length$", "max_length"),
        (r"^model_init_kwargs\.torch_dtype$", "model_init_kwargs.dtype"),
    ),
    finish=_finish,
    prepare=_prepare,
    fixed={"gradient_checkpointing": False},
)
