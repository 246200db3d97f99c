"""The command-line flags of a job: each stands here once, with the field of `Job` that it sets, its help and its words.

Commands and recipes take the flags that they support by name (`add_flags`, `flag`), and make their `Job` with `job_of`. What
a front does not take is not among its options, so that nothing is dropped without a word.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_like.job import Job
from nemo_like.options import (
    AC_STRATEGIES,
    COMPILE_BACKENDS,
    CONTEXT_METHODS,
    DDP,
    FLOAT8,
    FSDP2,
    LOSSES,
    OPTIMIZERS,
    SCHEDULES,
    STRATEGIES,
    AllocatorConfig,
    ContextParallel,
    ExpertParallel,
    OffloadConfig,
    PipelineParallel,
    PlanSearch,
    Precision,
    StepSpec,
    TensorParallel,
    parse_bytes,
    parse_dtype,
    parse_strategy,
)

RESHARD: dict[str, bool | int | None] = {"default": None, "yes": True, "no": False}
OFFLOADS = ("none", "boundary", "saved", "all")


@dataclass(frozen=True)
class Flag:
    """One flag of a job."""

    name: str
    """As a Python name; on the command line ``--name`` with ``_`` written as ``-``."""
    field: str
    """The field of `Job` that it sets, with the field of that: ``"tp.size"``."""
    default: Any
    help: str
    kind: Callable[[str], Any] = str
    choices: Sequence[str] = ()
    """The words that it may be; empty: any."""
    least: float | None = None
    """The smallest number that it may be."""

    @property
    def word(self) -> str:
        """What is written on the command line."""
        return "--" + self.name.replace("_", "-")


FLAGS: dict[str, Flag] = {
    flag.name: flag
    for flag in (
        Flag(
            "strategy",
            "strategy",
            "fsdp2",
            f"{' | '.join(STRATEGIES)}; on one rank all of them are 'single'",
            choices=STRATEGIES,
        ),
        Flag(
            "ac",
            "ac",
            "selective",
            f"activation checkpointing: {' | '.join(AC_STRATEGIES)}, or a budget like 40GiB, 50%% or auto",
        ),
        Flag("scope", "ac_scope", "all", "layers to checkpoint: all | language | vision | audio; several with commas"),
        Flag(
            "loss",
            "loss",
            "model",
            f"{' | '.join(LOSSES)}: head and loss of a few tokens at a time, never the whole logits",
            choices=LOSSES,
        ),
        Flag(
            "compile",
            "compile",
            "none",
            f"compile each layer: none | {' | '.join(COMPILE_BACKENDS)}",
            choices=("none", *COMPILE_BACKENDS),
        ),
        Flag(
            "precision",
            "precision.param_dtype",
            "float32",
            f"dtype to compute in: float32 | bfloat16; or {' | '.join(FLOAT8)}: bfloat16, and the layers' matmuls in "
            "float8 (torchao)",
        ),
        Flag("reduce_dtype", "precision.reduce_dtype", "float32", "dtype of gradients while they are reduced"),
        Flag(
            "offload",
            "offload",
            "none",
            f"activations that wait in host memory: {' | '.join(OFFLOADS)}",
            choices=OFFLOADS,
        ),
        Flag(
            "cpu_offload",
            "strategy.cpu_offload",
            False,
            "keep weights, gradients and optimizer state in host memory (fsdp2)",
            bool,
        ),
        Flag(
            "reshard_after_forward",
            "strategy.reshard_after_forward",
            "default",
            "free gathered layers after forward (fsdp2): default | yes | no, or over how many ranks they stay sharded; "
            "default: all but the last",
        ),
        Flag(
            "prefetch",
            "strategy.forward_prefetch",
            FSDP2.forward_prefetch,
            "layers gathered ahead (fsdp2)",
            int,
            least=0,
        ),
        Flag(
            "dp_replicate",
            "dp_replicate",
            1,
            "replicas of the sharded model (HSDP); must divide the number of ranks",
            int,
            least=1,
        ),
        Flag(
            "tp",
            "tp.size",
            1,
            "ranks that share a layer's matmuls (tensor parallel); must divide the number of ranks",
            int,
            least=1,
        ),
        Flag(
            "sequence_parallel",
            "tp.sequence_parallel",
            False,
            "with --tp: norms and residuals are split by tokens, too",
            bool,
        ),
        Flag("loss_parallel", "tp.loss_parallel", False, "with --tp: logits and loss stay split by vocabulary", bool),
        Flag(
            "cp",
            "cp.size",
            1,
            "ranks that share each sequence (context parallel); must divide the number of ranks",
            int,
            least=1,
        ),
        Flag(
            "cp_method",
            "cp.method",
            ContextParallel.method,
            f"how queries meet the keys of other ranks: {' | '.join(CONTEXT_METHODS)}",
            choices=CONTEXT_METHODS,
        ),
        Flag(
            "ep",
            "ep.size",
            1,
            "ranks that share a layer's experts (expert parallel); must divide the number of experts",
            int,
            least=1,
        ),
        Flag(
            "imbalance",
            "ep.imbalance",
            None,
            "rows of the fullest rank's experts, as a multiple of a balanced router's: 1 (balanced) to --ep (default: 1.5)",
            float,
            least=1,
        ),
        Flag(
            "pp",
            "pp.size",
            1,
            "ranks that the layers are divided among (pipeline); its micro-batches: --grad-accum, else twice as many",
            int,
            least=1,
        ),
        Flag(
            "pp_schedule",
            "pp.schedule",
            PipelineParallel.schedule,
            f"order of the pipeline's micro-batches: {' | '.join(SCHEDULES)}",
        ),
        Flag("balance", "pp.balance", "time", "layers of a stage: time | memory | counts such as 8,8,7,7"),
        Flag(
            "grad_accum",
            "step.microbatches",
            1,
            "micro-batches per step; gradients are summed over ranks once, in the last",
            int,
            least=1,
        ),
        Flag(
            "sync",
            "step.sync",
            StepSpec.sync,
            "micro-batches that reduce gradients: every | last",
            choices=("every", "last"),
        ),
        Flag(
            "drop_output",
            "step.keeps_output",
            False,
            "the loop drops the model's output (its logits) before backward",
            bool,
        ),
        Flag(
            "zero_grad",
            "step.zero_grad",
            StepSpec.zero_grad,
            "gradients between steps: free | zero",
            choices=("free", "zero"),
        ),
        Flag("ema", "step.ema", False, "the loop keeps a copy of the weights that it averages", bool),
        Flag("optimizer", "step.optimizer", StepSpec.optimizer, " | ".join(OPTIMIZERS), choices=OPTIMIZERS),
        Flag("gpu", "gpu", "h100-80gb", "the device to predict for: its name, or a JSON file"),
        Flag("world_size", "world_size", 1, "ranks in all", int, least=1),
        Flag(
            "alloc_conf",
            "allocator",
            None,
            "settings of CUDA's caching allocator, as in PYTORCH_ALLOC_CONF (default: that variable's)",
        ),
        Flag("no_skip", "search.skip", False, "recompute every op, also those that nobody reads", bool),
        Flag("host", "search.host", False, "also consider keeping outputs in host memory, over the GPU's link", bool),
        Flag(
            "host_memory",
            "search.host_memory",
            "64GiB",
            "host memory of one rank, for --host, --offload and --cpu-offload",
        ),
        Flag("measure", "search.measure", False, "time the ops on the device at hand instead of the GPU's table", bool),
    )
}


def add_flags(parser: argparse.ArgumentParser, names: Sequence[str], **defaults: Any) -> None:
    """Add the flags of these `names` to `parser`; `defaults`: other ones than the table's, by name."""
    for name in names:
        flag = FLAGS[name]
        default = defaults.get(name, flag.default)
        if flag.kind is bool:
            parser.add_argument(flag.word, action="store_true", default=default, help=flag.help)
            continue
        shown = "" if default is None else " (default: %(default)s)"
        parser.add_argument(flag.word, type=flag.kind, default=default, help=flag.help + shown)


def add_pins(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add the flags of these `names` as pins of a search: any number of values, of which one is taken; by default, all."""
    for name in names:
        flag = FLAGS[name]
        if flag.kind is bool:
            parser.add_argument(
                flag.word, action=argparse.BooleanOptionalAction, default=None, help=f"pinned: {flag.help}"
            )
        else:
            parser.add_argument(
                flag.word, type=flag.kind, nargs="+", help=f"pinned: {flag.help}; several values: any of them"
            )


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError where the flag `name` cannot have `value`."""
    flag = FLAGS[name]
    if flag.least is None or value is None:
        return
    if isinstance(value, bool) or not math.isfinite(value) or value < flag.least:
        raise ValueError(f"{flag.word} is {value!r}; it must be a finite number >= {flag.least}.")


def job_of(values: Mapping[str, Any], **fields: Any) -> Job:
    """Return the job that flags mean.

    Args:
        values: by name of the flag; those that are absent mean the table's defaults.
        fields: fields of `Job` that no flag says, such as ``layers``; they win.

    Raises:
        ValueError, TypeError: as `Job.of`; the message names the flag.
    """
    given = {name: values[name] for name in FLAGS if name in values}
    for name, value in given.items():
        check_flag(name, value)
    said = {name: flag.default for name, flag in FLAGS.items()} | given
    made: dict[str, Any] = {
        "strategy": _strategy(said),
        "ac": said["ac"],
        "ac_scope": _scopes(said["scope"]),
        "loss": said["loss"],
        "compile": None if said["compile"] == "none" else said["compile"],
        "precision": _precision(said),
        "offload": OffloadConfig.of(said["offload"]),
        "dp_replicate": said["dp_replicate"],
        "tp": TensorParallel(said["tp"], None, said["sequence_parallel"], said["loss_parallel"]),
        "cp": ContextParallel(said["cp"], said["cp_method"]),
        "ep": ExpertParallel(said["ep"], imbalance=said["imbalance"]),
        "pp": _pipeline(said),
        "step": _step(said),
        "allocator": allocator_here(said["alloc_conf"]),
        "search": PlanSearch(
            False if said["no_skip"] else None, said["host"], _bytes("host_memory", said), said["measure"]
        ),
    }
    made |= {name: said[name] for name in ("gpu", "world_size") if name in given}
    return Job.of(**{**made, **fields})


def changed_flags(job: Job, changed: Job) -> dict[str, Any]:
    """Return the values, by name, of the flags that say something else of `changed` than of `job`."""
    found = {}
    for flag in FLAGS.values():
        before, after = (functools.reduce(getattr, flag.field.split("."), each) for each in (job, changed))
        if before != after:
            found[flag.name] = _AS_FLAGS.get(flag.name, lambda value: value)(after)
    return found


_AS_FLAGS: Mapping[str, Callable[[Any], Any]] = {
    "ac": lambda ac: ac.mode,
    "loss": lambda loss: "model" if loss is None else "chunked",
    "offload": lambda offload: offload.mode,
    "drop_output": lambda kept: not kept,
    "reshard_after_forward": lambda value: reshard_word(value),
}
"""What a flag's value is for that of its field, where the two are not the same."""


def _bytes(name: str, said: Mapping[str, Any]) -> int:
    value = said[name]
    return parse_bytes(value, FLAGS[name].word) if isinstance(value, str) else value


def _strategy(said: Mapping[str, Any]) -> Any:
    strategy = parse_strategy(said["strategy"])
    reshard, prefetch = said["reshard_after_forward"], said["prefetch"]
    if isinstance(strategy, FSDP2):
        return FSDP2(_reshard(reshard), prefetch, prefetch, said["cpu_offload"])
    for name in ("cpu_offload", "reshard_after_forward", "prefetch"):
        if said[name] != FLAGS[name].default:
            kind = "ddp" if isinstance(strategy, DDP) else "single"
            raise ValueError(f"{FLAGS[name].word} is FSDP2's, and --strategy is {kind!r}. Leave one of the two out.")
    return strategy


def reshard_word(value: bool | int | None) -> str:
    """What ``--reshard-after-forward`` is for this value of `FSDP2.reshard_after_forward`."""
    return next((word for word, known in RESHARD.items() if known is value), str(value))


def _reshard(word: Any) -> bool | int | None:
    if word in RESHARD:
        return RESHARD[word]
    if isinstance(word, str) and word.isdigit():
        return int(word)
    raise ValueError(f"--reshard-after-forward is {word!r}; it must be {', '.join(RESHARD)}, or a number of ranks.")


def _scopes(scope: str) -> str | tuple[str, ...]:
    return tuple(scope.split(",")) if "," in scope else scope


def _precision(said: Mapping[str, Any]) -> Precision:
    word = said["precision"]
    matmuls = word.lower().replace("_", "-") if isinstance(word, str) else None
    if matmuls in FLOAT8:
        return Precision.of(matmuls)
    compute = parse_dtype("--precision", word)
    return Precision(compute, None if compute is None else parse_dtype("--reduce-dtype", said["reduce_dtype"]))


def _pipeline(said: Mapping[str, Any]) -> PipelineParallel:
    if said["pp"] == 1:
        return PipelineParallel()
    balance: Any = said["balance"]
    if balance not in ("time", "memory"):
        try:
            balance = tuple(int(word) for word in balance.split(","))
        except ValueError:
            raise ValueError(
                f"--balance is {balance!r}; it must be time, memory, or how many layers each stage gets, such as 8,8."
            ) from None
    many = said["grad_accum"] if said["grad_accum"] > 1 else None
    return PipelineParallel(said["pp"], said["pp_schedule"], many, balance=balance)


def _step(said: Mapping[str, Any]) -> StepSpec:
    count = said["grad_accum"] if said["pp"] == 1 else 1  # a pipeline cuts its one batch by itself
    return StepSpec(count, said["sync"], not said["drop_output"], said["zero_grad"], said["optimizer"], ema=said["ema"])


def allocator_here(said: str | None) -> AllocatorConfig:
    """Return the allocator's settings that `said` means; None: those that a job which is started here would read."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    text = next((os.environ[name] for name in names if name in os.environ), "") if said is None else said
    return AllocatorConfig.parse(text)
