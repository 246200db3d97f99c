"""The table of axolotl's YAML."""

from collections.abc import Iterator
from typing import Any

from nemo_like.settings.accelerate import NOT_READ, RENAMED, SHARDING, reduce_alike
from nemo_like.settings.formats import WHOLE, Format, ValueKind, only, preset, same, switch, words


def _finish(values: dict[str, Any]) -> Iterator[str]:
    if values.get("precision") == "full":
        values |= {"precision": "bf16", "dtype": "bf16"}
    if values.pop("_fp8", False):
        values["precision"] = "fp8-gather" if values.pop("_gathers", False) else "fp8"
    reduce_alike(values)
    if values.get("ac") == "offload":
        values |= {"ac": "full", "offload": "boundary"}
    adapter, rank = values.pop("_adapter", None), values.pop("_rank", None)
    if adapter is not None:
        values["lora"] = rank or 8
    if values.pop("_four_bit", False) or adapter == "qlora":
        if adapter is None:
            yield "load_in_4bit = True (without an adapter)"
        else:
            values["four_bit"] = True


# Keys: axolotl/utils/schemas (config.py, fsdp.py, peft.py, model.py). It trains through accelerate's FSDP2 plugin, so
# that its ``bf16`` and the default of resharding are accelerate's. Packed sequences have the full length, as a plan
# has.
TABLE = Format(
    framework="axolotl",
    marks=("base_model",),
    keys={
        "base_model": ("model", ValueKind(preset)),
        "sequence_len": ("seq_len", WHOLE),
        "micro_batch_size": ("batch_size", WHOLE),
        "gradient_accumulation_steps": ("grad_accum", WHOLE),
        "adapter": ("_adapter", same("lora", "qlora")),
        "lora_r": ("_rank", WHOLE),
        "load_in_4bit": ("_four_bit", switch()),
        "load_in_8bit": ("", only(False)),
        "bf16": ("precision", words({"auto": "bf16", True: "bf16", False: None, "full": "full"})),
        "fp16": ("", only(False)),
        "fp8": ("_fp8", switch()),
        "fp8_enable_fsdp_float8_all_gather": ("_gathers", switch()),
        "optimizer": (
            "optimizer",
            words(
                {
                    "adamw_torch": "adamw",
                    "adamw_torch_fused": "adamw-fused",
                    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "ao_adamw_8bit"), "adamw-8bit"),
                    "muon": "muon",
                    "sgd": "sgd",
                }
            ),
        ),
        "gradient_checkpointing": ("ac", words({True: "full", False: "none", "offload": "offload"})),
        "gradient_checkpointing_kwargs.use_reentrant": ("", only(True, False)),
        "activation_offloading": ("", only(False)),
        "torch_compile": ("compile", switch("inductor", None)),
        "liger_fused_linear_cross_entropy": ("loss", switch("chunked", None)),
        "tensor_parallel_size": ("tp", WHOLE),
        "context_parallel_size": ("cp", WHOLE),
        "dp_shard_size": ("dp_shard", WHOLE),
        "dp_replicate_size": ("dp_replicate", WHOLE),
        "fsdp_version": ("", only(2)),
        "flash_attention": ("", only(True)),
        "sdp_attention": ("", only(True)),
        "attn_implementation": ("", only("flash_attention_2", "flash_attention_3", "sdpa")),
        "fsdp": ("", only(["full_shard", "auto_wrap"])),
        **SHARDING,
    },
    ignored=(
        *NOT_READ,
        *("model_type", "tokenizer*", "special_tokens*", "tokens", "chat_template*", "datasets", "dataset_*", "hub_*"),
        *("test_datasets", "val_set_size", "output_dir", "strict", "debug", "seed", "wandb_*", "mlflow_*", "logging_*"),
        *("num_epochs", "max_steps", "lr_*", "learning_rate", "cosine_*", "warmup_*", "weight_decay", "adam_*", "tf32"),
        *(
            "max_grad_norm",
            "eval*",
            "save*",
            "resume_from_checkpoint",
            "auto_resume*",
            "early_stopping_*",
            "local_rank",
        ),
        *("lora_alpha", "lora_dropout", "lora_model_dir", "lora_fan_in_fan_out", "train_on_inputs", "group_by_length"),
        *("sample_packing*", "pad_to_sequence_len", "eval_sample_packing", "trust_remote_code", "revision_of_model"),
    ),
    implied={"fsdp_config.fsdp_reshard_after_forward": True},
    renamed=(*RENAMED, (r"^sequence_parallel_degree$", "context_parallel_size")),
    finish=_finish,
)
