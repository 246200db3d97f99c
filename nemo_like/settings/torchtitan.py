"""The table of torchtitan's TOML."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from nemo_like.options import COMPILE_BACKENDS, FLOAT8
from nemo_like.options.parallel import MXFP8
from nemo_like.settings.formats import (
    DTYPE,
    NAMES,
    ROTATION,
    SCHEDULE,
    WHOLE,
    WORD,
    Format,
    ValueKind,
    ac_of,
    cut_batch,
    only,
    same,
    switch,
    whole,
    words,
)

# By ``model.name`` and ``model.flavor``, the preset of the same shape.
FLAVORS = {
    ("llama3", "8B"): "llama3-8b",
    ("llama3", "70B"): "llama3-70b",
    ("llama3", "405B"): "llama3-405b",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
}
# By region that its layers declare, the tensors of a layer of transformers.
REGIONS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.inner_attention": ("attention",),
    "attention.wo": ("self_attn.o_proj",),
    "feed_forward.w1": ("mlp.gate_proj",),
    "feed_forward.w3": ("mlp.up_proj",),
    "feed_forward.w2": ("mlp.down_proj",),
}
WAYS = {"fused": "adamw-fused", "foreach": "adamw-foreach", "for-loop": "adamw-loop"}
ALLOCATOR = "expandable_segments:True"


def _tensors(regions: Iterable[str]) -> Iterator[str]:
    """Return the names of the tensors of regions, which may be globs; a region that is not known is a module's path."""
    for region in regions:
        tensors = [name for declared, names in REGIONS.items() if fnmatchcase(declared, region) for name in names]
        yield from tensors or [region]


def _finish(values: dict[str, Any]) -> Iterator[str]:
    take = values.pop
    flavor = (take("_name", None), take("_flavor", None))
    if flavor in FLAVORS:
        values["model"] = FLAVORS[flavor]
    elif any(flavor):
        yield f"model.name, model.flavor = {flavor[0]}, {flavor[1]} (give --model)"
    way = take("_way", None)
    if take("_adamw", False) and way:
        values["optimizer"] = way
    regions = take("_regions", None)
    if regions is not None and values.get("ac") == "selective":
        values["ac"] = ac_of("full", save=_tensors(regions))
    elif regions:
        yield f"activation_checkpoint.save_regions = {', '.join(regions)} (mode is not selective)"
    if values.get("ac") == "selective" and (every := take("_every", "op")) != "op":
        del values["ac"]
        yield f"activation_checkpoint.selective_ac_option = {every} (only some layers)"
    recipe, gathers = take("_recipe", "fp8"), take("_gathers", False)
    for converter in take("_converters", ()):
        if "float8" in converter and "grouped" not in converter:
            values["precision"] = "fp8-gather" if gathers and recipe == "fp8" else recipe
        else:
            yield f"model.converters = {converter}"
    parts, backend = take("_parts", ["model"]), take("_backend", "inductor")
    if take("_compile", False):
        values |= {"compile": backend} if "model" in parts else {}
        yield from (f"compile.components = {part}" for part in parts if part != "model")
    if values.get("tp", 1) > 1:  # its plans split the sequence, and unless told otherwise the logits
        values |= {"sequence_parallel": True, "loss_parallel": not take("_whole_logits", False)}
    values["alloc_conf"] = ALLOCATOR
    cut_batch(values)


def _prepare(values: dict[str, Any]) -> None:
    take = values.pop
    for flavor, model in FLAVORS.items():
        if model == values.get("model"):
            values["_name"], values["_flavor"] = flavor
            del values["model"]
    if values.get("optimizer") == "adamw":  # as torch builds it on CUDA
        values["optimizer"] = "adamw-foreach"
    if values.get("optimizer") in WAYS.values():
        values |= {"_adamw": True, "_way": take("optimizer")}
    if (kind := values.get("precision")) in FLOAT8 and kind not in MXFP8:
        recipe = {"fp8-rowwise": kind}.get(kind, "fp8")
        values |= {"_recipe": recipe, "_gathers": kind == "fp8-gather", "precision": "bf16"}
        values["_converters"] = ["quantize.linear.float8"]
    if (backend := take("compile", "none")) != "none":
        values |= {"_compile": True, "_parts": ["model"], "_backend": backend}
    if values.get("tp", 1) > 1:
        values["_whole_logits"] = not take("loss_parallel", False)
        if not take("sequence_parallel", False):
            values["sequence_parallel"] = "no"
    batch, rounds, ranks = values.get("batch_size", 1), take("grad_accum", 1), take("world_size", 1)
    if values.get("pp", 1) > 1:
        values |= {"_part": batch, "batch_size": batch * rounds}
    else:
        take("pp_schedule", None)
        values["global_batch"] = batch * rounds * ranks // values.get("tp", 1) // values.get("cp", 1)
    if values.get("alloc_conf") == ALLOCATOR:
        del values["alloc_conf"]


_FLOAT8, _AXIS, _STAGES = "quantize.linear.float8.", "parallelism.", "parallelism.pipeline_parallel_"
# Keys and defaults: torchtitan/config/job_config.py. The allocator's setting: run_train.sh, which starts every job.
TABLE = Format(
    framework="torchtitan",
    marks=("parallelism", "activation_checkpoint", "model.flavor"),
    keys={
        "model.name": ("_name", WORD),
        "model.flavor": ("_flavor", WORD),
        "model.converters": (
            "_converters",
            ValueKind(lambda value: value.split(",") if isinstance(value, str) else value),
        ),
        "optimizer.name": ("_adamw", words({"AdamW": True, "Adam": True})),
        "optimizer.implementation": ("_way", words(WAYS)),
        "optimizer.early_step_in_backward": ("", only(False)),
        "training.local_batch_size": ("batch_size", WHOLE),
        "training.global_batch_size": ("global_batch", whole(-1)),
        "training.seq_len": ("seq_len", WHOLE),
        "training.enable_cpu_offload": ("cpu_offload", switch()),
        "training.dtype": ("dtype", DTYPE),
        "training.mixed_precision_param": ("precision", DTYPE),
        "training.mixed_precision_reduce": ("reduce_dtype", DTYPE),
        f"{_AXIS}data_parallel_replicate_degree": ("dp_replicate", WHOLE),
        f"{_AXIS}data_parallel_shard_degree": ("dp_shard", whole(-1)),
        f"{_AXIS}fsdp_reshard_after_forward": (
            "reshard_after_forward",
            words({"default": None, "always": "yes", "never": "no"}),
        ),
        f"{_AXIS}tensor_parallel_degree": ("tp", WHOLE),
        f"{_AXIS}disable_loss_parallel": ("_whole_logits", switch()),
        f"{_AXIS}enable_async_tensor_parallel": ("async_tp", switch()),
        f"{_AXIS}enable_compiled_autograd": ("", only(False)),
        f"{_STAGES}degree": ("pp", WHOLE),
        f"{_STAGES}schedule": ("pp_schedule", SCHEDULE),
        f"{_STAGES}schedule_csv": ("pp_schedule", ValueKind(lambda value: value or None)),
        f"{_STAGES}microbatch_size": ("_part", WHOLE),
        f"{_AXIS}context_parallel_degree": ("cp", WHOLE),
        f"{_AXIS}context_parallel_rotate_method": ("cp_method", ROTATION),
        f"{_AXIS}expert_parallel_degree": ("ep", WHOLE),
        f"{_AXIS}expert_tensor_parallel_degree": ("", only(1)),
        "activation_checkpoint.mode": ("ac", same("none", "full", "selective")),
        "activation_checkpoint.selective_ac_option": ("_every", WORD),
        "activation_checkpoint.save_regions": ("_regions", NAMES),
        "compile.enable": ("_compile", switch()),
        "compile.components": ("_parts", ValueKind(list)),
        "compile.backend": ("_backend", same(*COMPILE_BACKENDS)),
        f"{_FLOAT8}recipe_name": ("_recipe", words({"tensorwise": "fp8", "rowwise": "fp8-rowwise"})),
        f"{_FLOAT8}enable_fsdp_float8_all_gather": ("_gathers", switch()),
        "fault_tolerance.enable": ("", only(False)),
    },
    ignored=(
        *("job.*", "profiling.*", "metrics.*", "lr_scheduler.*", "checkpoint.*", "comm.*", "validation.*", "debug.*"),
        *("memory_estimation.*", "experimental.*", "fault_tolerance.*", "model.hf_assets_path", "model.tokenizer_path"),
        *("model.print_after_conversion", "optimizer.*", f"{_FLOAT8}*", "activation_checkpoint.per_op_*"),
        *("activation_checkpoint.early_stop", "activation_checkpoint.preserve_rng_state", "training.dataset*"),
        *("training.max_norm", "training.steps", "training.gc_*", "training.seed", "training.deterministic"),
    ),
    implied={
        "training.local_batch_size": 8,
        "training.seq_len": 2048,
        "training.mixed_precision_param": "bfloat16",
        "training.mixed_precision_reduce": "float32",
        "optimizer.name": "AdamW",
        "optimizer.implementation": "fused",
        f"{_AXIS}data_parallel_replicate_degree": 1,
        f"{_AXIS}tensor_parallel_degree": 1,
        f"{_STAGES}degree": 1,
        f"{_STAGES}schedule": "1F1B",
        f"{_AXIS}context_parallel_degree": 1,
        f"{_AXIS}expert_parallel_degree": 1,
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "2",
    },
    renamed=(
        (r"^(quantize\.dense\.)?float8\.", _FLOAT8),
        (r"^training\.compile$", "compile.enable"),
        (r"^training\.batch_size$", "training.local_batch_size"),
    ),
    finish=_finish,
    prepare=_prepare,
    fixed={"activation_checkpoint.selective_ac_option": "op"},
)
