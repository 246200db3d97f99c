"""The command-line flags of a job: every field of `Job`, and of its parts, that has a `Flag` in its metadata.

Commands and recipes take the flags that they support by name (`options_of`), and make their `Job` with `job_of`. A flag
that a front does not take is not among its options, so that none is dropped without a word.
"""

import argparse
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from nemo_like._util.words import did_you_mean
from nemo_like.job import Job
from nemo_like.options import DDP, FLOAT8, FSDP2, Precision, parse_dtype, parse_strategy
from nemo_like.options.flag import FIELDS, Flag


def _flags(cls: type, prefix: str = "") -> Iterator[Flag]:
    """Yield the flags of the fields of `cls`, and of those options classes that are a field's default."""
    for field in dataclasses.fields(cls):
        if (flag := field.metadata.get("flag")) is not None:
            default = field.default if flag.default is FIELDS else flag.default
            name = flag.name or field.name
            yield replace(
                flag,
                name=name,
                default=default,
                column=flag.column or name,
                field=prefix + field.name,
                owner=cls,
            )
        if dataclasses.is_dataclass(field.default):
            yield from _flags(type(field.default), f"{field.name}.")


FLAGS: dict[str, Flag] = {flag.name: flag for flag in _flags(Job)}
# Defaults of `plan`, `fit`, `predict` and their commands; the others, such as the device, are those of `FLAGS`.
SEQ_LEN, BATCH_SIZE, CONFIGURATIONS, PRECISION = 4096, 1, 8, "bf16"


def check_keywords(function: Callable[..., Any], given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a keyword in `given` that is neither an argument of `function` nor in `known`."""
    names = [*inspect.signature(function).parameters, *known]
    if wrong := [name for name in given if name not in names]:
        near = did_you_mean(wrong[0], names) or f" It has {', '.join(sorted(names))}."
        raise TypeError(f"{function.__name__}() has no keyword {wrong[0]!r}.{near}")


def flags_on(command: str) -> tuple[str, ...]:
    """Return the names of the flags that `command` takes (see `Flag.on`)."""
    return tuple(flag.name for flag in FLAGS.values() if command in flag.on.split())


def flags_of(part: str) -> tuple[str, ...]:
    """Return the names of the flags that set options of a `part` of the job, such as ``"pp"``, but for its size."""
    fields = ((flag.name, flag.field.partition(".")) for flag in FLAGS.values())
    return tuple(name for name, (head, _, tail) in fields if head == part and tail not in ("", "size"))


def options_of(names: Iterable[str], **defaults: object) -> dict[str, dict[str, Any]]:
    """Return the flags of these `names` as options for a `HelpParser`; `defaults`: other ones than the table's, by name."""
    options = {}
    for flag in map(FLAGS.__getitem__, names):
        default, switch = defaults.get(flag.name, flag.default), flag.kind is bool
        shown = "" if default is None or switch else " (default: %(default)s)"
        options[flag.word] = {
            "group": flag.group,
            "default": default,
            "least": flag.least,
            "help": flag.help.replace("%", "%%") + shown,
            **({"action": "store_true"} if switch else {"type": flag.kind}),
        }
    return options


def pins_of(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the flags of these `names` as constraints of a search: several values are allowed, and without one all."""
    switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": None}
    return {
        flag.word: {
            "group": flag.group,
            "least": flag.least,
            "help": f"fixed: {flag.help}{'' if flag.kind is bool else '; several values: any of them'}".replace(
                "%", "%%"
            ),
            **(switch if flag.kind is bool else {"nargs": "+", "type": flag.kind}),
        }
        for flag in map(FLAGS.__getitem__, names)
    }


def job_of(values: Mapping[str, Any], **fields: Any) -> Job:
    """Return the job that flags mean.

    Args:
        values: by name of the flag; those that are absent mean the table's defaults.
        fields: fields of `Job` that no flag sets, such as ``layers``; they win.

    Raises:
        ValueError, TypeError: as `Job.of`.
    """
    values_of_flags = {name: values[name] for name in FLAGS if name in values}
    every = {name: flag.default for name, flag in FLAGS.items()} | values_of_flags
    parts: dict[str, dict[str, Any]] = {}
    for flag in FLAGS.values():
        head, _, tail = flag.field.partition(".")
        parts.setdefault(head, {})[tail] = flag.read(every[flag.name])
    parts["precision"] = {"": _precision(every["precision"], every["reduce_dtype"])}
    parts["strategy"] = {"": _strategy(parts["strategy"])}
    if every["pp"] == 1:
        parts["pp"] = {}
    else:  # a pipeline cuts its one batch by itself
        parts["pp"]["microbatches"] = every["grad_accum"] if every["grad_accum"] > 1 else None
        parts["step"]["microbatches"] = 1
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Job)}
    objects = {head: part[""] if "" in part else type(defaults[head])(**part) for head, part in parts.items()}
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
            flags[flag.name] = flag.write(after)
    return flags


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


def _precision(word: Any, reduce_dtype: Any) -> Precision:
    matmuls = word.lower().replace("_", "-") if isinstance(word, str) else None
    if matmuls in FLOAT8:
        return Precision.of(matmuls)
    return Precision(parse_dtype("--precision", word), parse_dtype("--reduce-dtype", reduce_dtype))
