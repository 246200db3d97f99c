"""Suite ``public``: every published training step that we know of, beside what the planner predicts for it.

The rows are in ``tests/tools/benchmarks/public/*.csv``, each with its source. The planner is the product's own, asked as
a user would ask it. Where a source ran something that it has no option for, the row says what differs.
"""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import math
import re
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_like.job import Job
from nemo_like.models import ModelSource, resolve_model, source_of
from nemo_like.options import (
    FSDP2,
    AllocatorConfig,
    ChunkedLoss,
    ContextParallel,
    ExpertParallel,
    PipelineParallel,
    Precision,
    StepSpec,
    TensorParallel,
)
from nemo_like.planning.accuracy import DENSE, LONG
from nemo_like.planning.devices import Device, resolve_device
from nemo_like.planning.model.traced import with_adapters
from nemo_like.planning.predictions.rank import fullest_peaks, parts_at_peak, rank_peak
from nemo_like.planning.predictions.reserved import Reserved, reserved_on, reserved_within
from nemo_like.planning.predictions.seconds import StepSeconds, step_seconds
from nemo_like.planning.query import Choices, PlanQuery
from tests.tools.benchmarks.suite import Column, Measured, Suite, markdown
from tests.tools.benchmarks.torchtitan_step import (
    Float32Head,
    compiled_loss,
    loop_loss,
    reserved_of_stages,
    with_last_products,
)

PAGE = Path(__file__).parents[3] / "docs" / "evidence" / "public-numbers.md"
"""Page that a run of all rows writes."""
_ACCURACY = Path(__file__).parents[3] / "nemo_like" / "planning" / "accuracy.json"
_FOLDER = Path(__file__).with_name("public")
GIB = 2**30

RESERVED, ALLOCATED, ACTIVE, FILLS, OOM, NONE = "reserved", "allocated", "active", "card that it fills", "oom", "none"
UNKNOWN = "unknown"
"""Kinds of published memory. ``NONE``: nothing is said; ``UNKNOWN``: not how it was read."""


# --- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One published step."""

    id: str
    source: str
    model: str
    gpu: str
    gpus: int
    gpus_per_node: int
    dp_replicate: int
    dp_shard: int
    tp: int
    cp: int
    pp: int
    ep: int
    schedule: str
    virtual_stages: int
    micro_batch: int
    grad_accum: int
    """Micro-batches of a step; of a pipeline, those that go through it."""
    seq_len: int
    ac: str
    """Empty: the source does not say."""
    compile: bool
    precision: str
    async_tp: bool
    memory: float | None
    """Bytes."""
    memory_kind: str
    tokens_per_second: float | None
    """Of one GPU."""
    tflops: float | None
    """Of one GPU, where the source has that in place of tokens."""
    note: str

    @property
    def project(self) -> str:
        """Return the name of whose loop it is."""
        known = ("torchtitan", "foundry", "ibm", "bridge", "tune", "Llama 3 paper", "KempnerForge", "unsloth")
        known += ("prime-rl", "Automodel", "trl", "axolotl")
        return next((name for name in known if name.lower() in self.source.lower()), self.source)

    @property
    def axes(self) -> str:
        """Return the sizes above 1, in words."""
        sizes = {name: getattr(self, name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")}
        return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one GPU"

    @property
    def how(self) -> str:
        """Return checkpointing, precision and the rest, in words."""
        words = [self.ac or "ac not said", self.precision, self.schedule]
        words += ["compiled"] * self.compile + ["async tp"] * self.async_tp
        words += [f"{self.grad_accum} micro-batches"] * (self.grad_accum > 1)
        return ", ".join(filter(None, words))


def all_rows() -> list[Row]:
    """Return the rows of all files."""
    rows = [_titan(line, "h100-96", "torchtitan 2024-12", f"A{k}") for k, line in _lines("torchtitan_2024_12")]
    rows += [
        replace(_titan(line, "h200", "torchtitan 2025-06", f"B{k}"), note="no expandable segments")  # by their command
        for k, line in _lines("torchtitan_2025_06_h200")
    ]
    rows += [_more(line, f"C{k}") for k, line in _lines("more_2025")]
    lines = [line for name in ("steps_2026", "unused_2026", "unseen_2026") for _, line in _lines(name)]
    notes = {line["id"]: line["note"] for line in lines}
    for line in lines:  # "as V1": with what that row has
        if (other := re.search(r"as ([A-Z]\d+)", line["note"])) and other[1] in notes:
            line["note"] += f"; {notes[other[1]]}"
    return rows + [_step(line) for line in lines]


def _lines(name: str) -> Iterable[tuple[int, dict[str, str]]]:
    """Return the rows of a file, from 1 on; lines that begin with ``#`` name its source."""
    text = (_FOLDER / f"{name}.csv").read_text(encoding="utf-8")
    return enumerate(csv.DictReader(line for line in text.splitlines() if line and not line.startswith("#")), start=1)


def _titan(line: dict[str, str], gpu: str, source: str, name: str) -> Row:
    pp = int(line["pp"])
    virtual = 2 if line["schedule"].startswith("interleaved") else 1
    return _row(
        line,
        id=name,
        source=source,
        gpu=gpu,
        schedule=line["schedule"],
        virtual_stages=virtual,
        micro_batch=int(line["local_batch"]) // pp,  # as many micro-batches as ranks, until January 2025
        grad_accum=pp,
        async_tp=line["async_tp"] == "yes",
        memory=float(line["reserved_gib"]) * GIB,
        memory_kind=RESERVED,
        note="",
    )


def _more(line: dict[str, str], name: str) -> Row:
    sizes = [int(line[axis]) for axis in ("tp", "cp", "pp")]
    gpus, node = int(line["gpus"]), _per_node(line["gpu"])
    shard = int(line["dp_shard"] or node)  # HSDP: a node shards
    replicas = gpus // (shard * sizes[0] * sizes[1] * sizes[2])
    data, micro = shard * replicas, int(line["micro_batch"])
    batch = re.search(r"global batch (\d+)", line["note"])
    stages = re.search(r"(\d+) virtual stages", line["note"])
    interleaved = stages is not None or "interleaved" in line["note"]
    tflops = re.search(r"\((\d+) TFLOP/s\)", line["note"])
    kind = {"active": ACTIVE, "": NONE}.get(line["memory_kind"], RESERVED)  # torchtitan logs what is reserved
    return _row(
        line,
        id=name,
        gpus_per_node=node,
        dp_replicate=replicas,
        dp_shard=shard,
        schedule=("interleaved_1f1b" if interleaved else "1f1b") if sizes[2] > 1 else "",
        virtual_stages=int(stages[1]) if stages else 7 if interleaved else 1,  # the paper: about one layer a stage
        micro_batch=micro,
        grad_accum=int(batch[1]) // (data * micro) if batch else 1,
        memory=float(line["memory_gib"]) * GIB if line["memory_gib"] else None,
        memory_kind=kind,
        tflops=float(tflops[1]) if tflops else None,
    )


def _step(line: dict[str, str]) -> Row:
    kinds = (FILLS, ALLOCATED, RESERVED, ACTIVE, NONE, UNKNOWN)
    kind = next(kind for kind in kinds if line["memory_kind"].startswith(kind))
    out = line["memory"] == "OOM"
    gpus, others = int(line["gpus"]), math.prod(int(line[axis]) for axis in ("tp", "cp", "pp"))
    unit = GIB if line["memory_unit"] == "GiB" else 10**9
    return _row(
        line,
        source=f"{line['source']} ({line['date']})",
        dp_shard=min(int(line["dp_shard"]), gpus // others),  # some sources count the ranks of cp among its own
        gpus_per_node=int(line["gpus_per_node"]),
        schedule="",
        micro_batch=int(line["micro_batch"]),
        grad_accum=int(line["grad_accum"]),
        memory=None if out or not line["memory"] else float(line["memory"]) * unit,
        memory_kind=OOM if out else kind,
    )


def _row(line: dict[str, str], **more: Any) -> Row:
    speed = line["tokens_per_second_per_gpu"]
    sizes = {name: int(line.get(name) or 1) for name in ("gpus", "dp_shard", "tp", "cp", "pp", "ep", "seq_len")}
    read = {
        "gpus_per_node": 8,
        "dp_replicate": 1,
        "virtual_stages": 1,
        "async_tp": False,
        "tflops": None,
        "compile": line["compile"] == "yes",
        "tokens_per_second": float(speed) if speed else None,
    }
    words = {name: line[name] for name in ("id", "source", "model", "gpu", "ac", "precision", "note") if name in line}
    return Row(**(read | words | sizes | more))


def _per_node(gpu: str) -> int:
    return 72 if gpu.startswith("gb") else 8


# --- models ---------------------------------------------------------------------------------------------------------

_QWEN = {"hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "head_dim": 128}
_SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    "llama2-7b": (4096, 11_008, 32, 32, 32, 32_000),
    "qwen-7b": (4096, 11_008, 32, 32, 32, 151_936),
    "llama2-13b": (5120, 13_824, 40, 40, 40, 32_000),
    "llama2-70b": (8192, 28_672, 80, 64, 8, 32_000),
    # KempnerForge's "13B": 2/3 x 4 x 5120 x 1.3, up to a multiple of 256; 14.84 billion parameters.
    "llama3-14.8b": (5120, 17_920, 40, 40, 8, 128_256),
}
"""Llamas that are no preset: width, of the MLP, layers, heads, of keys and values, vocabulary."""


def _wide(width: int, ffn: int, layers: int, heads: int, kv: int, vocab: int) -> dict[str, Any]:
    """Return a config with heads of 128 and a tied head."""
    shape = dict(hidden_size=width, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads)
    return shape | dict(num_key_value_heads=kv, vocab_size=vocab, head_dim=128, tie_word_embeddings=True)


_MPT = {"mpt-7b": (4096, 32, 32), "mpt-30b": (7168, 48, 64), "mpt-70b": (8192, 80, 64)}
"""Width, layers, heads."""
_NAMES = {"llama3.2-3b": "llama3-3b"}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    # Qwen3 (arXiv 2505.09388), table 1; the heads are 128 wide.
    "qwen3-0.6b": ("Qwen3Config", _wide(1024, 3072, 28, 16, 8, 151_936)),
    "qwen3-4b": ("Qwen3Config", _wide(2560, 9728, 36, 32, 8, 151_936)),
    # config.json of LiquidAI/LFM2-350M and of mistralai/Ministral-3-8B-Base-2512, whose text model it is.
    "lfm2-350m": (
        "Lfm2Config",
        {
            **_wide(1024, 6656, 16, 16, 8, 65_536),
            "head_dim": 64,
            "block_auto_adjust_ff_dim": True,
            "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
        },
    ),
    "ministral-8b": ("Ministral3Config", _wide(4096, 14_336, 34, 32, 8, 131_072) | {"tie_word_embeddings": False}),
}


def source_of_row(row: Row) -> ModelSource:
    """Return what builds the model of `row`."""
    import transformers

    name, most = row.model, max(131_072, row.seq_len)
    if name in _SHAPES:
        width, ffn, layers, heads, kv, vocab = _SHAPES[name]
        shape = dict(hidden_size=width, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads)
        config: Any = transformers.LlamaConfig(
            **shape, num_key_value_heads=kv, vocab_size=vocab, max_position_embeddings=most
        )
        config.tie_word_embeddings = False
        return source_of(name, config)
    if name == "qwen3-32b":
        config = transformers.Qwen3Config(
            **_QWEN, num_attention_heads=64, num_key_value_heads=8, vocab_size=151_936, max_position_embeddings=most
        )
        config.tie_word_embeddings = False
        return source_of(name, config)
    if name in _CONFIGS:
        kind, values = _CONFIGS[name]
        config = getattr(transformers, kind)(**values, max_position_embeddings=most)
        return source_of(name, config)
    if name in _MPT:
        # The same products, norms and tied head with fused attention, which transformers' MPT has not.
        width, layers, heads = _MPT[name]
        config = transformers.Starcoder2Config(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=50_368,
            use_bias=False,
            sliding_window=None,
            max_position_embeddings=most,
            tie_word_embeddings=True,
        )
        return source_of(name, config)
    return resolve_model(_NAMES.get(name, name))


def model_of(row: Row) -> nn.Module:
    """Return the model of `row` on the meta device, with parameters as its loop stores them."""
    source = source_of_row(row)
    if row.project == "tune":  # its attention repeats keys and values for all heads, which backward then has
        transformers: Any = importlib.import_module("transformers")
        transformers.AttentionInterface.register("repeated", repeated_keys)
        source.config._attn_implementation = "repeated"
    model, _ = source.built("meta", torch.bfloat16 if _in_bf16(row) else None)
    if row.precision.startswith("qlora"):
        return with_adapters(model.train(), int(row.precision.split("r")[-1]), torch.bfloat16, four_bit=True)
    if row.precision.startswith("lora"):
        from peft import LoraConfig, get_peft_model

        rank = int(row.precision.split("r")[-1])
        config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(model, config, autocast_adapter_dtype=False)
    if _titan_before(row, "2024-07") or (row.project == "prime-rl" and not _chunks_of_rl(row)):  # float32 is returned
        model.lm_head.__class__ = Float32Head  # a plan's copy of the model has no hooks of others
    return model


def repeated_keys(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> Any:
    """Return causal attention to keys and values that were repeated for all heads, and no weights."""
    again = module.num_key_value_groups
    keys, values = (states.repeat_interleave(again, 1) for states in (key, value))
    out = nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)
    return out.transpose(1, 2).contiguous(), None


def _in_bf16(row: Row) -> bool:
    """Return whether weights and optimizer state are in 16 bits."""
    return row.project in ("tune", "KempnerForge", "axolotl", "Automodel") or "lora" in row.precision


FP8, LOSS, SEQUENCE = "FP8", "loss_parallel", "sequence_parallel"
"""Options that `_nearest` may leave out."""


# --- jobs -----------------------------------------------------------------------------------------------------------


def loop_loss_as_it_is(output: Any) -> torch.Tensor:
    """KempnerForge's: in the dtype of the logits."""
    logits = output.logits.flatten(0, 1)
    return nn.functional.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


def published_device() -> Device:
    """Return the H100 of torchtitan's tables: 96 GB of HBM2e at 2.4 TB/s and 500 W, as their page says.

    Everything else is the table's H100 with 80 GB and 700 W. Its reachable FLOP/s are lowered with the power: an assumption,
    not a measurement, and the one constant that was chosen with their rows in sight (docs/evidence/sources-of-constants.md).
    """
    known, clock = resolve_device("h100-80gb"), 500 / 700
    return replace(
        known,
        name="h100-96gb-500w",
        memory_bytes=int(96e9),
        bandwidth=2.4e12 * 0.84,
        matmul_flops={kind: value * clock for kind, value in known.matmul_flops.items()},
        attention_flops={kind: value * clock for kind, value in known.attention_flops.items()},
    )


def device_of_row(row: Row) -> Device:
    """Return the GPU of `row` in hosts as it says."""
    known = published_device() if row.gpu == "h100-96" else resolve_device(row.gpu)
    return replace(known, gpus_per_node=row.gpus_per_node)


def attention_of(row: Row) -> str | None:
    """Return the kernel that the source ran, where it is another one than PyTorch picks today."""
    if named := re.search("FA2|FA3|TE", row.note):  # the row's own words come before those of a row that it is like
        return {"FA2": "flash", "FA3": "fa3", "TE": "cudnn"}[named[0]]
    # torchtitan itself chose cuDNN on capability 10 alone (pull request 1196, May 2025), and PyTorch of 2023 and 2024 had
    # flash attention first.
    titan = row.project == "torchtitan" and "b200" not in row.gpu
    return "flash" if titan or row.project in ("foundry", "ibm") else None


def job_of(row: Row, without: Sequence[str] = ()) -> Job:
    """Return the job, with the options that the source ran but those `without`."""
    fields: dict[str, Any] = {"gpu": device_of_row(row), "world_size": row.gpus, "step": _step_of(row)}
    fields["attention"] = attention_of(row)
    fields["precision"] = "bf16" if FP8 in without else _precision(row)
    if row.dp_replicate > 1:
        fields["dp_replicate"] = row.dp_replicate
    if _titan_before(row, "2025-07"):  # `apply_fsdp` of parallelize_llama.py
        fields["strategy"] = FSDP2(ends="root")
    if row.project == "Automodel" and row.gpus == 1:
        fields["strategy"] = FSDP2(on_one_rank=True)
    if row.project == "prime-rl":
        tied = source_of_row(row).config.tie_word_embeddings
        fields["strategy"] = FSDP2(ends="root" if tied else "apart", on_one_rank=row.gpus == 1)
    if row.tp > 1:
        # A pipeline's loss is its last stage's own.
        parts = row.project in ("torchtitan", "KempnerForge", "bridge", "Llama 3 paper")
        losses = row.project != "KempnerForge"
        fields["tp"] = TensorParallel(
            row.tp,
            sequence_parallel=parts and SEQUENCE not in without,
            loss_parallel=losses and LOSS not in without,
            asynchronous=row.async_tp,
        )
    if row.cp > 1:
        fields["cp"] = ContextParallel(row.cp, "ring" if "ring" in row.note else "all_gather")
    if row.pp > 1:
        fields["pp"] = PipelineParallel(
            row.pp, row.schedule, row.grad_accum, stages_per_rank=row.virtual_stages, balance=_balance(row)
        )
    if row.compile:
        fields["compile"] = "inductor"
    if "no expandable" not in row.note and (row.project == "torchtitan" or "expandable" in row.note):
        fields["allocator"] = AllocatorConfig(expandable_segments=True)
    if row.project == "torchtitan" and not _titan_before(row, "2026-04"):  # its default from then on: eight chunks
        fields["loss"] = ChunkedLoss(row.micro_batch * row.seq_len // 8)
    if _from(row, "chunked loss") or "cut cross entropy" in row.note or _chunks_of_rl(row):
        fields["loss"] = ChunkedLoss()
    if "chunked loss of 256" in row.note:
        fields["loss"] = ChunkedLoss(256)
    if row.ep > 1:
        fields["ep"] = ExpertParallel(row.ep, imbalance=1.0 if "forced balance" in row.note else None)
    if _from(row, "activation offloading") or "on host" in row.note:
        fields["offload"] = "boundary"
    return Job.of(**fields)


def _balance(row: Row) -> str | tuple[int, ...]:
    """Return the layers of each stage: torchtitan gave what does not divide to the stages behind the first one."""
    if row.project != "torchtitan":
        return "time"
    stages = row.pp * row.virtual_stages
    each, more = divmod(source_of_row(row).config.num_hidden_layers, stages)
    return tuple(each + (0 < index <= more) for index in range(stages))


_TUNE = ("packed", "compile", "chunked loss", "checkpointing", "activation offloading", "8-bit AdamW")
"""What each of torchtune's rows adds to the one before it."""


def _from(row: Row, word: str) -> bool:
    """Return whether `row` is torchtune's that adds `word`, or one behind it."""
    if row.project != "tune":
        return False
    mine = max(index for index, each in enumerate(_TUNE) if each in row.note)
    return mine >= _TUNE.index(word)


def _chunks_of_rl(row: Row) -> bool:
    """Return whether `row` is prime-rl's reinforcement learning, whose head works in chunks."""
    return row.project == "prime-rl" and "as V4" in row.note


def _in_backward(row: Row) -> bool:
    """Return whether `row` is torchtune's with ``optimizer_in_bwd``; of adapters nothing is said of it."""
    return _from(row, "activation offloading") and not row.precision.startswith("lora")


def _precision(row: Row) -> Any:
    if _in_bf16(row) and row.precision == "bf16" and row.gpus == 1:
        return None
    if _in_bf16(row) and row.precision == "bf16":
        # FSDP2 reduces in float32 in KempnerForge's policy.
        return Precision("bf16")
    if row.precision == "fp8":
        return "fp8"
    reduce = "bf16" if row.project in ("foundry", "ibm") else None
    return Precision("bf16", reduce)


_MERGED = {"torchtitan #3914": "2026-06"}
"""Months of pull requests that are later than late 2025."""


def _titan_before(row: Row, month: str) -> bool:
    """Return whether it ran torchtitan from before a month ("2025-04"); rows without a date are from late 2025."""
    date = re.search(r"\(?(20\d{2}-\d{2})[-\d]*\)?$", row.source)
    return row.project == "torchtitan" and (_MERGED.get(row.source, "2025-12") if date is None else date[1]) < month


def _step_of(row: Row) -> StepSpec:
    turns = 1 if row.pp > 1 else row.grad_accum
    early = row.id.startswith("A") or "foreach AdamW" in row.note
    if row.project == "torchtitan":
        loss: Any = loop_loss if not row.compile or _titan_before(row, "2025-04") else compiled_loss
        if row.pp > 1 or not _titan_before(row, "2026-04"):
            loss = None
        kept = _titan_before(row, "2024-07")  # the loop had the logits till the step's end
        return StepSpec(turns, keeps_output=kept, optimizer="adamw" if early else "adamw-fused", loss_fn=loss)
    if row.project == "KempnerForge":
        return StepSpec(turns, sync="last", optimizer="adamw-fused", loss_fn=loop_loss_as_it_is)
    if row.project in ("prime-rl", "Automodel"):  # prime-rl keeps the model's logits, in float32
        loss = None if _chunks_of_rl(row) else loop_loss
        return StepSpec(
            turns, keeps_output=row.project == "prime-rl" and loss is not None, optimizer="adamw", loss_fn=loss
        )
    if row.project in ("trl", "axolotl"):  # Trainer's defaults
        optimizer = "adamw-8bit" if "8-bit AdamW" in row.note else "adamw-fused"
        return StepSpec(turns, keeps_output=False, optimizer=optimizer)
    if row.project == "unsloth":
        return StepSpec(turns, keeps_output=False, optimizer="adamw-8bit")
    if row.project == "tune":  # the peaks of its own rows leave no room for copies of foreach
        optimizer = "adamw-8bit" if _from(row, "8-bit AdamW") else "adamw-fused"
        return StepSpec(turns, keeps_output=False, optimizer=optimizer, in_backward=_in_backward(row))
    return StepSpec(turns, keeps_output=False, optimizer="adamw")


def ac_of(row: Row) -> str:
    """Return the mode of checkpointing that is predicted with."""
    if row.ac:
        return row.ac
    return "selective" if row.project == "torchtitan" else "full" if row.cp > 1 else "none"


def differs(row: Row) -> list[str]:
    """Return what the source ran that the planner has no option for, or that the row does not say."""
    words = []
    if not row.ac:
        words.append(f"ac not said: {ac_of(row)} taken")
    if "not measured" in device_of_row(row).sources.get("matmul", ""):
        words.append(f"rates of a {row.gpu} are not measured")
    if row.project == "torchtitan" and row.precision == "fp8":
        words.append("gathers are not in FP8")
    if row.project == "foundry":
        words += ["FSDP1", "MPT with RoPE", "gradient accumulation not said"]
    if row.project == "ibm":
        words += ["FSDP1"] + ["they recompute whole layers, some of them"] * (row.ac == "selective")
    if row.project == "bridge":
        words += ["Megatron's kernels and sharding"]
    if row.project == "Llama 3 paper":
        words += ["7 stages a rank taken", "own kernels"]
    if row.project == "tune":
        words.append("fused AdamW taken")
    if _chunks_of_rl(row):
        words.append("reinforcement learning: a loss in chunks taken")
    if row.project == "KempnerForge" and row.tp > 1:
        words.append("each projection gathers its input by itself")
    return words


# --- predictions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """What is predicted for a row."""

    reserved: int = 0
    allocated: int = 0
    tensors: int = 0
    seconds: float = 0.0
    parts: dict[str, float] | None = None
    """Seconds by what takes them."""
    bytes_of: dict[str, int] | None = None
    """Bytes of the peak by part."""
    at: str = ""
    within: int | None = None
    """Bytes that are reserved where the card has a limit."""
    longest: int | None = None
    """Tokens of the longest sequence that fits."""
    tokens_per_second: float | None = None
    cpu_seconds: float = 0.0
    instead: tuple[str, ...] = ()
    """What was predicted with in place of what the planner refuses."""


def sample_of(row: Row, seq_len: int | None = None) -> dict[str, torch.Tensor]:
    """Return one micro-batch of one rank."""
    ids = torch.zeros(row.micro_batch, seq_len or row.seq_len, dtype=torch.long)
    loss = _step_of(row).loss_fn
    return {"input_ids": ids} if loss is not None else {"input_ids": ids, "labels": ids.clone()}


def predict(row: Row, *, bytes_too: bool = True) -> Prediction:
    """Return the prediction for `row`; nothing runs.

    Raises:
        ValueError: the planner refuses the job.
    """
    start = time.process_time()
    model = model_of(row)
    job, query, instead = _nearest(row, model)
    choices = query.uniform(ac_of(row))
    # Since late 2025 its own selective checkpointing leaves a layer's last product out (torchtitan #1881 ran with that).
    keeps_last = _titan_before(row, "2025-10") and ac_of(row) == "selective"
    if keeps_last and not row.compile and row.pp == 1:
        query = with_last_products(query)
    seconds = step_seconds(query, choices)
    made = Prediction(seconds=seconds.total, parts=dict(seconds.parts), tokens_per_second=_speed(row, seconds))
    if bytes_too:
        kept = row.pp > 1 and _titan_before(row, "2025-06")
        reserved, rank = _most(query, choices, reserved_of_stages if kept else reserved_on)
        peak = rank_peak(query, rank, choices)
        made = replace(
            made,
            reserved=reserved.reserved + query.input_bytes,
            allocated=reserved.allocated + query.input_bytes,
            tensors=reserved.tensors,
            bytes_of=parts_at_peak(query, rank, choices),
            at=peak.at,
        )
        if row.memory_kind in (OOM, FILLS):
            made = replace(made, within=_within(query, choices, limit_of(row)))
    if row.memory_kind == FILLS:
        made = replace(made, longest=_longest(row, model, job))
    return replace(made, cpu_seconds=time.process_time() - start, instead=instead)


def _nearest(row: Row, model: nn.Module) -> tuple[Job, PlanQuery, tuple[str, ...]]:
    """Return the job of `row`, or the nearest one that the planner takes, with what was changed."""
    options, refusals = _options_of(row), list[ValueError]()
    for count in range(len(options) + 1):
        for without in itertools.combinations(options, count):
            try:
                job = job_of(row, without)
                return job, PlanQuery.from_model(model, sample_of(row), job), without
            except ValueError as error:
                refusals.append(error)
    raise refusals[0]


def _options_of(row: Row) -> list[str]:
    """Return what may be left out of the job where the planner refuses it."""
    return [FP8] * (row.precision == "fp8") + [LOSS, SEQUENCE] * (row.tp > 1)


def _most(query: PlanQuery, choices: Choices, reserved: Callable[..., Reserved]) -> tuple[Reserved, int]:
    ranks = list(fullest_peaks(query, choices))
    found = [(reserved(query, rank, choices), rank) for rank in ranks]
    return max(found, key=lambda pair: pair[0].reserved)


def _within(query: PlanQuery, choices: Choices, limit: int) -> int:
    return max(reserved_within(query, choices, limit, list(fullest_peaks(query, choices)))) + query.input_bytes


def limit_of(row: Row) -> int:
    """Return the bytes of the card: as the driver reports them, without what its context takes."""
    if row.gpu == "h100-96":
        return int(95.0 * GIB)
    return {"h100": int(79.2 * GIB), "rtx-4090": int(23.6 * GIB)}[row.gpu]


def _longest(row: Row, model: nn.Module, job: Job) -> int:
    """Return the longest sequence that fits, to a few per cent, by the planner's own bytes."""

    def fits(tokens: int) -> bool:
        query = PlanQuery.from_model(model, sample_of(row, tokens), job)
        return _within(query, query.uniform(ac_of(row)), limit_of(row)) <= limit_of(row)

    low, high = 256, row.seq_len
    while fits(high):
        low, high = high, 2 * high
        if high > 16 * row.seq_len:
            return low
    while high - low > max(128, high // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _speed(row: Row, seconds: StepSeconds) -> float:
    data = row.dp_replicate * row.dp_shard
    return row.micro_batch * row.grad_accum * row.seq_len * data / row.gpus / seconds.total


def published_speed(row: Row) -> float | None:
    """Return tokens/s of one GPU; of a row with FLOP/s, by ``6 N + 6 x layers x width x tokens`` for each token: weights,
    and attention with a causal mask."""
    if row.tflops is None:
        return row.tokens_per_second
    source = source_of_row(row)
    config = source.config
    weights = sum(p.numel() for p in source.build("meta").parameters())
    attention = config.num_hidden_layers * config.hidden_size * row.seq_len
    return row.tflops * 1e12 / (6 * weights + 6 * attention)


# --- the table ------------------------------------------------------------------------------------------------------


def compared(row: Row, find: Callable[[Row], Prediction] = predict) -> dict[str, Any]:
    """Return prediction and publication of `row`, or the reason why there is no prediction."""
    theirs = published_speed(row)
    line: dict[str, Any] = {
        "id": row.id,
        "source": row.source,
        "project": row.project,
        "model": row.model,
        "gpus": row.gpus,
        "gpu": row.gpu,
        "axes": row.axes,
        "step": f"{row.micro_batch} x {row.seq_len}",
        "how": row.how,
        "published_tokens_per_second": theirs,
        "published_gib": None if row.memory is None else row.memory / GIB,
        "memory_kind": row.memory_kind,
        "differs": "; ".join(differs(row)) or None,
        "refused": None,
        "kinds": kinds_of_row(row),
        "unsaid": not row.ac or row.memory_kind == UNKNOWN,
        "attention": attention_of(row) or "PyTorch's",
    }
    try:
        made = find(row)
    except Exception as error:  # noqa: BLE001 - the table goes on: a row that fails is a finding
        words = " ".join(str(error).split())
        return line | {"refused": f"{type(error).__name__}: {words[:300]}"}
    mine = {RESERVED: made.reserved, ALLOCATED: made.allocated, ACTIVE: made.allocated, NONE: made.reserved}
    have = mine.get(row.memory_kind, made.reserved if made.within is None else made.within) / GIB
    line |= {
        "differs": "; ".join([*(f"{name} is refused" for name in made.instead), *differs(row)]) or None,
        "tokens_per_second": made.tokens_per_second,
        "speed_off": None if theirs is None or made.tokens_per_second is None else made.tokens_per_second / theirs - 1,
        "gib": have,
        "memory_off": None,
        "verdict": None,
        "longest": made.longest,
        "seconds": made.seconds,
        "parts": made.parts,
        "bytes": made.bytes_of,
        "at": made.at,
        "reserved": made.reserved,
        "allocated": made.allocated,
        "cpu_seconds": made.cpu_seconds,
    }
    if row.memory_kind in (RESERVED, ALLOCATED, ACTIVE):
        line["memory_off"] = have / line["published_gib"] - 1
    if row.memory_kind == OOM:
        line["verdict"] = "too large" if have * GIB > limit_of(row) else "fits"
    if row.memory_kind == FILLS and made.longest is not None:
        line["verdict"] = f"up to {made.longest:,} tokens"
    return line


def kinds_of_row(row: Row) -> tuple[str, ...]:
    """Return the kinds of job that `row` is one of (`nemo_like.planning.accuracy`)."""
    kinds = {
        "mixtures": row.model in ("qwen3-30b-a3b", "gpt-oss-20b"),
        "long sequences": row.seq_len >= LONG,
        "pipelines": row.pp > 1,
        "LoRA": "lora" in row.precision,
    }
    return tuple(kind for kind, is_one in kinds.items() if is_one) or (DENSE,)


_UNSEEN = ("V",)
"""First letters of rows whose sources were looked at after the planner was written."""
_WITH_ROWS_IN_SIGHT = ("h100-96",)
"""GPUs of which a constant was chosen with their rows in sight; their speeds are no errors of a kind."""


def with_calibration(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `lines` with ``calibrated_off``: the error of speed with one factor, the median of the other rows of the same
    software and GPU; None where there is no other one."""
    factors = {
        line["id"]: line["published_tokens_per_second"] / line["tokens_per_second"]
        for line in lines
        if line.get("speed_off") is not None
    }
    made = []
    for line in lines:
        group = [
            factors[other["id"]]
            for other in lines
            if other["id"] in factors and other is not line and all(other[n] == line[n] for n in ("project", "gpu"))
        ]
        known = line["id"] in factors and group
        off = statistics.median(group) / factors[line["id"]] - 1 if known else None
        made.append(line | {"calibrated_off": off})
    return made


def errors(lines: Sequence[dict[str, Any]], key: str) -> list[tuple[float, str]]:
    """Return the absolute errors ``key`` of the lines that have one, with their names."""
    return [(abs(line[key]), line["id"]) for line in lines if line.get(key) is not None]


def _near(name: str, off: Sequence[tuple[float, str]], bounds: Sequence[float]) -> list[str]:
    if not off:
        return []
    near = ", ".join(f"{sum(o <= b for o, _ in off)} within {b:.0%}" for b in bounds)
    middle, worst = statistics.median(o for o, _ in off), max(off)
    return [f"{name}: {len(off)} rows, {near}; median {middle:.1%}, worst {worst[0]:.0%} ({worst[1]})."]


def accuracy(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of ``nemo_like/planning/accuracy.json``: rows and median errors."""

    def middle(off: Sequence[tuple[float, str]]) -> dict[str, Any]:
        return {"rows": len(off), "median": round(statistics.median(o for o, _ in off), 3)}

    outside = [line for line in lines if line["gpu"] not in _WITH_ROWS_IN_SIGHT]
    kinds = (*dict.fromkeys(kind for line in lines for kind in line["kinds"]),)
    return {
        "peaks": middle(errors(lines, "memory_off")),
        "kinds": {
            kind: middle(errors([line for line in outside if kind in line["kinds"]], "speed_off")) for kind in kinds
        },
        "calibrated": middle(errors(lines, "calibrated_off")),
    }


def summary(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return sentences on how near all rows are."""
    done = [line for line in lines if line["refused"] is None]
    words = [f"{len(lines)} rows, {len(done)} predicted, {len(lines) - len(done)} refused."]
    unseen = [line for line in done if line["id"].startswith(_UNSEEN)]
    old = [line for line in done if not line["id"].startswith(_UNSEEN)]
    said = [line for line in done if not line["unsaid"]]
    for part, of in (
        ("known before", old),
        ("first looked at now (V)", unseen),
        ("that state unit, kind and mode", said),
    ):
        words += _near(f"Memory, sources {part}", errors(of, "memory_off"), (0.05, 0.10))
        words += _near(f"Speed, sources {part}", errors(of, "speed_off"), (0.05, 0.15))
    words += _near("Memory", errors(done, "memory_off"), (0.05, 0.10))
    words += _near("Speed", errors(done, "speed_off"), (0.05, 0.15))
    words += _near("Speed, calibrated", errors(done, "calibrated_off"), (0.05, 0.15))
    outside = [line for line in done if line["gpu"] not in _WITH_ROWS_IN_SIGHT]
    for kind in dict.fromkeys(kind for line in done for kind in line["kinds"]):
        of_kind = errors([line for line in outside if kind in line["kinds"]], "speed_off")
        words += _near(f"Speed of {kind}", of_kind, (0.15, 0.35))
    out = [line for line in done if line["memory_kind"] == OOM]
    if out:
        words.append(f"Out of memory: {sum(line['verdict'] == 'too large' for line in out)} of {len(out)} said.")
    for key, theirs, name in (
        ("tokens_per_second", "published_tokens_per_second", "speed"),
        ("gib", "published_gib", "memory"),
    ):
        right, pairs = _order(done, key, theirs)
        if pairs:
            words.append(f"Pairs of one source, model and GPU in the right order by {name}: {right} of {pairs}.")
    return words


def _order(lines: Sequence[dict[str, Any]], mine: str, theirs: str) -> tuple[int, int]:
    """Return how many pairs of rows of a group stand in the published order, and how many there are; equal ones (to 1 %)
    are not counted."""
    right = pairs = 0
    for a, b in itertools.combinations(lines, 2):
        if any(a[name] != b[name] for name in ("source", "model", "gpu")):
            continue
        if any(line[theirs] is None or line["memory_kind"] == FILLS for line in (a, b)):
            continue
        if abs(a[theirs] / b[theirs] - 1) > 0.01:
            pairs += 1
            right += (a[mine] < b[mine]) == (a[theirs] < b[theirs])
    return right, pairs


def _run(options: Namespace) -> Measured:
    """Predict every row (or those of `options.model`, if it is one of their models)."""
    rows = all_rows()
    if options.model in {row.model for row in rows}:
        rows = [row for row in rows if row.model == options.model]
    lines = []
    for row in rows:
        lines.append(compared(row))
        print(_progress(lines[-1]), file=sys.stderr, flush=True)
    lines = with_calibration(lines)
    if len(rows) == len(all_rows()):
        PAGE.write_text(page(lines), encoding="utf-8")
        _ACCURACY.write_text(json.dumps(accuracy(lines)) + "\n", encoding="utf-8")
    about = {"source": "tests/tools/benchmarks/public/*.csv"}
    return Measured("Published steps, by the planner", lines, about, summary(lines))


def _progress(line: dict[str, Any]) -> str:
    if line["refused"] is not None:
        return f"{line['id']}: {line['refused']}"
    off = {name: line[f"{name}_off"] for name in ("memory", "speed") if line[f"{name}_off"] is not None}
    words = ", ".join(f"{name} {value:+.1%}" for name, value in off.items())
    return f"{line['id']}: {words} {line['verdict'] or ''} ({line['cpu_seconds']:.1f} s of CPU)"


_COLUMNS = (
    Column("id", "row"),
    Column("project", "source"),
    Column("model", "model"),
    Column("gpus", "GPUs"),
    Column("gpu", "GPU"),
    Column("axes", "axes"),
    Column("step", "sequences x tokens"),
    Column("how", "how"),
    Column("attention", "attention"),
    Column("tokens_per_second", "tokens/s/GPU", "{:,.0f}".format),
    Column("published_tokens_per_second", "published", "{:,.0f}".format),
    Column("speed_off", "off", "{:+.0%}".format),
    Column("calibrated_off", "calibrated", "{:+.0%}".format),
    Column("gib", "GiB", "{:.1f}".format),
    Column("published_gib", "published", "{:.1f}".format),
    Column("memory_off", "off", "{:+.0%}".format),
    Column("memory_kind", "kind"),
    Column("verdict", "verdict"),
    Column("differs", "differs"),
    Column("refused", "refused"),
)

_TITLE = "# Public numbers, predicted"
_HOW = """\
## How they were made

Others published speed and memory of training steps on GPUs. `python -m tests.tools.benchmarks public` predicts each of
them with the planner, on a CPU. Nothing ran on a GPU here.

- The rows are in `tests/tools/benchmarks/public/`, each file with its source. No row is left out.
- All rows of a GPU have one set of constants. One was chosen with rows in sight: the clock of the H100 of 500 W
  ([constants](sources-of-constants.md)). No other is fitted to a row. Errors of a kind leave out the speeds of that GPU.
- *attention* is the kernel that the source ran. *calibrated* is the error with one factor, the median of the other rows of
  the same software and GPU, as `--calibrate-from` finds it in a log.
- The jobs have the options that the source ran, or the nearest that the planner takes. The column *differs* says which.
- *kind* says what the published memory is. `reserved` is held by the caching allocator; `allocated` and `active` by
  tensors. `oom`: they ran out of memory. `card that it fills`: their longest sequence.
- Rows V are of sources that were first looked at when the planner was as it is. Memory of kind `unknown` is not compared.
- Speeds of the Llama 3 paper are made of its FLOP/s. A token counts as 6 N and attention with a causal mask.
- Errors that others state of their own rows: xMem (arXiv 2510.21048; one GPU, no checkpointing, no sharding) 2.7 to
  13 % of memory, AMD's Primus 10 % on four rows.
"""


def page(lines: Sequence[dict[str, Any]]) -> str:
    """Return the page of documentation with the table of `lines`."""
    table = markdown(_COLUMNS, lines)
    listed = "\n".join(f"- {words}" for words in summary(lines))
    return f"{_TITLE}\n\n## How near\n\n{listed}\n\n{_HOW}\n## Rows\n\n{table}\n"


PUBLIC = Suite(
    help="predict every published step that we know of with the planner, and print prediction and publication",
    columns=_COLUMNS,
    run=_run,
)

__all__ = ["PUBLIC", "Prediction", "Row", "all_rows", "compared", "job_of", "model_of", "page", "predict", "summary"]
