"""Read and write a settings file; the format is recognised by its keys."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_like._util.extras import require
from nemo_like.options import FSDP2, ContextParallel
from nemo_like.settings import accelerate, automodel, axolotl, maxtext, megatron, torchtitan, trainer
from nemo_like.settings.formats import Format, flat

if TYPE_CHECKING:
    from nemo_like.job import Job

FORMATS = tuple(
    framework.TABLE for framework in (torchtitan, accelerate, automodel, axolotl, trainer, megatron, maxtext)
)


@dataclass(frozen=True)
class Settings:
    """A settings file in our words."""

    framework: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """By the name of a flag, or of another option of ``plan``, such as ``seq_len``."""
    not_understood: tuple[str, ...] = ()
    """``key = value`` of keys without a flag."""


def read_settings(path: str | Path) -> Settings:
    """Read a file of accelerate, axolotl, torchtitan, NeMo Automodel, Megatron, MaxText or transformers.Trainer (JSON).

    Raises:
        OSError: it can't be read.
        ValueError: it is not TOML, YAML or JSON, of none of these, or has a value that its key can't have.
        MissingExtraError: it is YAML, and PyYAML is not installed.
    """
    path = Path(path)
    try:
        tree = _parsed(path, path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--from is {str(path)!r}, which is not there. Give an existing file.") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} has no keys: it is {type(tree).__name__}. Give a settings file.")
    keys = {key for key, _ in flat(tree)}
    for table in FORMATS:
        if any(key == mark or key.startswith(f"{mark}.") for key in keys for mark in table.marks):
            values, unknown = table.read(path, tree)
            return Settings(table.framework, values, unknown)
    known = "; ".join(f"{table.framework} by {' or '.join(table.marks)}" for table in FORMATS)
    raise ValueError(
        f"{path} has the keys {', '.join(map(str, tree)) or 'none'}, and is of no framework that is read here. These are "
        f"recognised: {known}. Give a file with one of these keys."
    )


def write_settings(path: str | Path, job: Job, **more: Any) -> tuple[str, ...]:
    """Write `job` to a file and return the options that its format can't state.

    ``.toml``: torchtitan's; ``.yaml``: accelerate's; ``.json``: arguments of transformers.Trainer.

    Args:
        job: the job. Its number of ranks must be set.
        more: values by flag that are not in a job: ``model``, ``seq_len``, ``batch_size``, ``dtype``, ``lora``,
            ``four_bit``, and ``ac`` in a word, where it is that of a plan.

    Raises:
        ValueError: another suffix; a strategy that is not FSDP2.
    """
    path = check_suffix(path)
    if not isinstance(job.strategy, FSDP2):
        word = type(job.strategy).__name__.lower()
        raise ValueError(
            f"strategy is {word!r}, and settings are those of FSDP2. Use strategy='fsdp2', also for one rank."
        )
    table, to_text = _WRITTEN[path.suffix]
    tables, left = settings_of(table, job, **more)
    path.write_text(to_text(tables), encoding="utf-8")
    return left


def settings_of(table: Format, job: Job, **more: Any) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Return the tables of a file for `job`, and the options that its format can't state; see `write_settings`."""
    values = _values(job) | {name: value for name, value in more.items() if value not in (None, False)}
    for name in ("precision", "reduce_dtype"):
        values.setdefault(name, values.get("dtype", "fp32"))
    notes = []
    budgets = table is trainer.TABLE and job.cp.size == 1
    if not budgets and values["ac"] not in ("none", "full", *(() if table is accelerate.TABLE else ("selective",))):
        notes.append(f"ac = {values['ac']} (written as full, which needs least)")
        values["ac"] = "full"
    tables, left = table.write(values)
    usual = _plain() | {"dtype": "fp32", "cp_method": ContextParallel.method, "batch_size": 1}
    return tables, (*notes, *(f"{name} = {value}" for name, value in left.items() if value != usual.get(name)))


def check_suffix(path: str | Path) -> Path:
    """Return the path of ``--to``, whose suffix states the format.

    Raises:
        ValueError: another suffix.
    """
    path = Path(path)
    if path.suffix not in _WRITTEN:
        raise ValueError(
            f"--to is {str(path)!r}, whose suffix is of no format that is written here. Give a name that ends with .toml "
            "(torchtitan), .yaml or .yml (accelerate), or .json (transformers.Trainer)."
        )
    return path


def _plain() -> dict[str, Any]:
    """Return the defaults of the flags that describe a job, and not the device or the search."""
    from nemo_like.flags import FLAGS

    others = ("strategy", "gpu", "host", "host_memory", "imbalance")
    return {name: flag.default for name, flag in FLAGS.items() if name not in others}


def _values(job: Job) -> dict[str, Any]:
    from nemo_like.flags import changed_flags
    from nemo_like.job import Job
    from nemo_like.options import dtype_word, parse_dtype

    plain = _plain()
    changed = changed_flags(Job.of(ac="none"), job.change(ac="none"))
    values = {name: changed.get(name, default) for name, default in plain.items()} | {
        "ac": getattr(job.ac, "mode", "none"),
        "precision": job.precision.matmuls or dtype_word(parse_dtype("precision", job.precision.param_dtype)),
        "reduce_dtype": dtype_word(parse_dtype("precision", job.precision.reduce_dtype)),
        "alloc_conf": "expandable_segments:True" if job.allocator.expandable_segments else None,
        "dp_shard": job.dp_shard,
        "world_size": job.ranks,
    }
    if job.pp.size > 1:
        values["grad_accum"] = job.pp.microbatches
    return {name: value for name, value in values.items() if value is not None}


def _parsed(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path} is not valid JSON: {error.msg} (at line {error.lineno}, column {error.colno}). Correct that line."
            ) from None
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    if re.match(r"\s*(\[[\w.\"-]+\]|[\w.-]+\s*=)", first):
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path} is not valid TOML: {error}. Correct that line.") from None
    yaml = require("yaml", "yaml", f"to read {path}")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (at line {mark.line + 1}, column {mark.column + 1})"
        raise ValueError(
            f"{path} is not valid YAML: {getattr(error, 'problem', error)}{where}. Correct that line."
        ) from None


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tables of plain values as TOML; JSON writes these values alike."""
    parts = (
        "\n".join((f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())))
        for name, table in tables.items()
        if table
    )
    return "\n\n".join(parts) + "\n"


def _yaml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tables of plain values as YAML; JSON writes these values alike."""
    lines = list[str]()
    for name, table in tables.items():
        lines += [f"{name}:"] if name else []
        lines += [f"{'  ' if name else ''}{key}: {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def nested(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return one tree of tables whose names are dotted.

    >>> nested({"": {"a": 1}, "b.c": {"d": 2}})
    {'a': 1, 'b': {'c': {'d': 2}}}
    """
    tree = dict[str, Any]()
    for path, table in tables.items():
        inner = tree
        for name in path.split(".") if path else ():
            inner = inner.setdefault(name, {})
        inner.update(table)
    return tree


# By suffix: the format that is written, and the function that makes its text.
_WRITTEN = {
    ".toml": (torchtitan.TABLE, _toml),
    ".yaml": (accelerate.TABLE, _yaml),
    ".yml": (accelerate.TABLE, _yaml),
    ".json": (trainer.TABLE, lambda tables: json.dumps(nested(tables), indent=2) + "\n"),
}
