"""The command-line flags of a job: each is here once, with the field of `Job` that it sets, its help and its words.

Commands and recipes take the flags that they support by name (`add_flags`, `flag`), and make their `Job` with `job_of`. What
a front does not take is not among its options, so that nothing is dropped without a word.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_like._util.field_docs import docs_in_file, field_docs
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
from nemo_like.options.step import SYNC

if TYPE_CHECKING:  # torch comes with it, and the help of a flag needs neither
    from nemo_like.job import Job

RESHARD: dict[str, bool | int | None] = {"default": None, "yes": True, "no": False}
OFFLOADS = ("none", "boundary", "saved", "all")


@dataclass(frozen=True)
class Flag:
    """One flag of a job. Its help is the first sentence of its field's documentation."""

    name: str
    """As a Python name; on the command line ``--name`` with ``_`` written as ``-``."""
    field: str
    """The field of `Job` that it sets, with the field of that: ``"tp.size"``."""
    default: Any
    kind: Callable[[str], Any] = str
    choices: Sequence[str] = ()
    """The words that it may be; empty: any."""
    least: float | None = None
    """The smallest number that it may be."""
    on: str = "plan"
    """The commands that take it: ``plan``, ``fit``, and ``pins`` for those that pin a search of ``fit``."""
    words: str = ""
    """Values that it may have, for its help; default: its choices."""
    note: str = ""
    """Its help where it means the opposite of its field."""

    @property
    def word(self) -> str:
        """Return the flag as it is written on the command line."""
        return "--gpus" if self.name == "world_size" else "--" + self.name.replace("_", "-")

    @property
    def help(self) -> str:
        """Return what the flag does, in a line."""
        head, _, tail = self.field.partition(".")
        docs = field_docs(_CLASSES[head]) if tail else docs_in_file(Path(__file__).parent / "job.py", "Job")
        doc = self.note or docs.get(tail or head, "")
        text = re.split(r"\.(?= |$)|; None", doc.replace("`", "").replace('"', ""))[0]
        words = self.words or " | ".join(self.choices)
        start = text[:1].lower() if text[1:2].islower() else text[:1]
        return (start + text[1:] + (f": {words}" if words else "")).replace("%", "%%")


_CLASSES = {
    "strategy": FSDP2,
    "tp": TensorParallel,
    "cp": ContextParallel,
    "ep": ExpertParallel,
    "pp": PipelineParallel,
    "precision": Precision,
    "step": StepSpec,
    "search": PlanSearch,
}
"""The class of a field that flags set in parts."""

_DTYPES = f"float32 | bfloat16 | {' | '.join(FLOAT8)}"
FLAGS: dict[str, Flag] = {
    flag.name: flag
    for flag in (
        Flag("strategy", "strategy", "fsdp2", choices=STRATEGIES, on=""),
        Flag("ac", "ac", "selective", words=" | ".join(AC_STRATEGIES), on=""),
        Flag("scope", "ac_scope", "all", words="all | language | vision | audio, several with commas", on=""),
        Flag("gpu", "gpu", "h100-80gb", on="plan fit"),
        Flag("world_size", "world_size", 1, int, least=1),
        Flag("dp_replicate", "dp_replicate", 1, int, least=1, on="plan pins"),
        Flag("tp", "tp.size", 1, int, least=1, on="plan pins"),
        Flag("sequence_parallel", "tp.sequence_parallel", False, bool, on="plan pins"),
        Flag("loss_parallel", "tp.loss_parallel", False, bool, on="plan pins"),
        Flag("async_tp", "tp.asynchronous", False, bool, on="plan"),
        Flag("cp", "cp.size", 1, int, least=1, on="plan pins"),
        Flag("cp_method", "cp.method", ContextParallel.method, choices=CONTEXT_METHODS, on="plan pins"),
        Flag("ep", "ep.size", 1, int, least=1, on="plan pins"),
        Flag("imbalance", "ep.imbalance", None, float, least=1, on="plan fit"),
        Flag("pp", "pp.size", 1, int, least=1, on="plan pins"),
        Flag("pp_schedule", "pp.schedule", PipelineParallel.schedule, words=" | ".join(SCHEDULES), on="plan pins"),
        Flag("stages_per_rank", "pp.stages_per_rank", None, int, least=1, on="plan pins"),
        Flag("balance", "pp.balance", "time", words="time | memory | counts such as 8,8,7,7", on="plan fit"),
        Flag("precision", "precision.param_dtype", "float32", words=_DTYPES),
        Flag(
            "reduce_dtype",
            "precision.reduce_dtype",
            None,
            on="plan fit",
            note="The dtype to reduce gradients in (FSDP2); default: float32, and that of the parameters where "
            "--precision is their dtype.",
        ),
        Flag("optimizer", "step.optimizer", StepSpec.optimizer, choices=OPTIMIZERS),
        Flag("grad_accum", "step.microbatches", 1, int, least=1, on="plan pins"),
        Flag("loss", "loss", "model", choices=LOSSES, on="plan pins"),
        Flag("sync", "step.sync", StepSpec.sync, choices=SYNC, on="plan pins"),
        Flag(
            "drop_output",
            "step.keeps_output",
            False,
            bool,
            on="plan fit",
            note="The loop drops the model's output before backward.",
        ),
        Flag("zero_grad", "step.zero_grad", StepSpec.zero_grad, choices=("free", "zero"), on="plan fit"),
        Flag("ema", "step.ema", False, bool, on="plan fit"),
        Flag("optimizer_in_backward", "step.in_backward", False, bool, on="plan fit"),
        Flag("compile", "compile", "none", choices=("none", *COMPILE_BACKENDS), on="plan"),
        Flag("offload", "offload", "none", choices=OFFLOADS, on="plan pins"),
        Flag("cpu_offload", "strategy.cpu_offload", False, bool, on="plan pins"),
        Flag("reshard_after_forward", "strategy.reshard_after_forward", "default", words="default | yes | no | ranks"),
        Flag("prefetch", "strategy.forward_prefetch", FSDP2.forward_prefetch, int, least=0, on="plan fit"),
        Flag("alloc_conf", "allocator", None, on="plan fit"),
        Flag("host", "search.host", False, bool, on="plan fit"),
        Flag("host_memory", "search.host_memory", "64GiB", on="plan fit"),
        Flag("measure", "search.measure", False, bool, on="plan fit"),
    )
}


def flags_on(command: str) -> tuple[str, ...]:
    """Return the names of the flags that `command` takes (see `Flag.on`)."""
    return tuple(flag.name for flag in FLAGS.values() if command in flag.on.split())


def add_flags(parser: argparse.ArgumentParser, names: Sequence[str], **defaults: object) -> None:
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
        fields: fields of `Job` that no flag sets, such as ``layers``; they win.

    Raises:
        ValueError, TypeError: as `Job.of`; the message names the flag.
    """
    from nemo_like.job import Job

    values_of_flags = {name: values[name] for name in FLAGS if name in values}
    for name, value in values_of_flags.items():
        check_flag(name, value)
    with_defaults = {name: flag.default for name, flag in FLAGS.items()} | values_of_flags
    parts: dict[str, dict[str, Any]] = {}
    for flag in FLAGS.values():
        head, _, tail = flag.field.partition(".")
        parts.setdefault(head, {})[tail] = _READ.get(flag.name, _as_it_is)(with_defaults[flag.name])
    parts["precision"] = {"": _precision(with_defaults)}
    parts["strategy"] = {"": _strategy(parts["strategy"])}
    if with_defaults["pp"] == 1:
        parts["pp"] = {}
    else:  # a pipeline cuts its one batch by itself
        parts["pp"]["microbatches"] = with_defaults["grad_accum"] if with_defaults["grad_accum"] > 1 else None
        parts["step"]["microbatches"] = 1
    objects = {head: part[""] if "" in part else _CLASSES[head](**part) for head, part in parts.items()}
    for name in ("gpu", "world_size"):
        if name not in values_of_flags:
            del objects[name]
    return Job.of(**{**objects, **fields})


def changed_flags(job: Job, changed: Job) -> dict[str, Any]:
    """Return the values, by name, of the flags that have another value in `changed` than in `job`."""
    flags = {}
    for flag in FLAGS.values():
        before, after = (functools.reduce(getattr, flag.field.split("."), each) for each in (job, changed))
        if before != after:
            flags[flag.name] = _AS_FLAGS.get(flag.name, lambda value: value)(after)
    return flags


_AS_FLAGS: Mapping[str, Callable[[Any], Any]] = {
    "ac": lambda ac: ac.mode,
    "loss": lambda loss: "model" if loss is None else "chunked",
    "offload": lambda offload: offload.mode,
    "drop_output": lambda kept: not kept,
    "reshard_after_forward": lambda value: reshard_word(value),
}
"""Functions that make a flag's value of that of its field, where the two are not the same."""


def _as_it_is(value: object) -> Any:
    return value


def _strategy(part: Mapping[str, Any]) -> Any:
    """Return the strategy of these options by name; the word itself has no name."""
    strategy = parse_strategy(part[""])
    options = {name: value for name, value in part.items() if name}
    if isinstance(strategy, FSDP2):
        return FSDP2(**options, backward_prefetch=options["forward_prefetch"])
    for name, value in options.items():
        if value != getattr(FSDP2(), name):
            kind = "ddp" if isinstance(strategy, DDP) else "single"
            word = next(flag.word for flag in FLAGS.values() if flag.field == f"strategy.{name}")
            raise ValueError(f"{word} is FSDP2's, and --strategy is {kind!r}. Leave one of the two out.")
    return strategy


def reshard_word(value: bool | int | None) -> str:
    """Return the word of ``--reshard-after-forward`` for this value of `FSDP2.reshard_after_forward`."""
    return next((word for word, known in RESHARD.items() if known is value), str(value))


def _reshard(word: object) -> bool | int | None:
    if word in RESHARD:
        return RESHARD[word]
    if isinstance(word, str) and word.isdigit():
        return int(word)
    raise ValueError(f"--reshard-after-forward is {word!r}; it must be {', '.join(RESHARD)}, or a number of ranks.")


def _scopes(scope: str) -> str | tuple[str, ...]:
    return tuple(scope.split(",")) if "," in scope else scope


def _precision(values: Mapping[str, Any]) -> Precision:
    word = values["precision"]
    matmuls = word.lower().replace("_", "-") if isinstance(word, str) else None
    if matmuls in FLOAT8:
        return Precision.of(matmuls)
    compute = parse_dtype("--precision", word)
    return Precision(compute, parse_dtype("--reduce-dtype", values["reduce_dtype"]))


def balance_of(value: Any) -> str | tuple[int, ...]:
    """Return the balance that ``--balance`` means.

    Raises:
        ValueError: neither a word nor numbers of layers.
    """
    if value in ("time", "memory"):
        return str(value)
    try:
        return tuple(int(word) for word in value.split(","))
    except ValueError:
        raise ValueError(
            f"--balance is {value!r}; it must be time, memory, or how many layers each stage gets, such as 8,8."
        ) from None


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of the environment with settings of CUDA's caching allocator; the first one that is set counts."""


def allocator_here(value: str | None) -> AllocatorConfig:
    """Return the allocator's settings that `said` means; None: those that a job which is started here would read."""
    text = (
        next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), "") if value is None else value
    )
    return AllocatorConfig.parse(text)


_READ: Mapping[str, Callable[[Any], Any]] = {
    "scope": _scopes,
    "compile": lambda word: None if word == "none" else word,
    "offload": OffloadConfig.of,
    "balance": balance_of,
    "drop_output": lambda dropped: not dropped,
    "reshard_after_forward": _reshard,
    "alloc_conf": allocator_here,
    "host_memory": lambda size: parse_bytes(size, "--host-memory") if isinstance(size, str) else size,
}
"""Functions that make a field's value of that of its flag, where the two are not the same."""
