"""`nemo-like layers`: the modules of a model to shard and to checkpoint. The first thing to run on an unknown one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nemo_like._util.console import refuse_unread
from nemo_like._util.table import (
    ByteUnit,
    Column,
    Fact,
    Table,
    as_json,
    byte_word,
    paragraph,
    parameters_word,
    screen_width,
)
from nemo_like.commands import WIDE, print_report
from nemo_like.options import parse_dtype

if TYPE_CHECKING:  # the command imports torch only when it runs
    from torch import nn

    from nemo_like.layers import Layer

EXAMPLES = (
    "--model llama3-8b",
    "--model llama3-8b --names --seq-len 8192",
    "--model config.json --scope language",
    "--model mymodels:build --layers 'blocks.*'",
)


@dataclass(frozen=True)
class Run:
    """Consecutive layers of one list, class and size: one line of the report."""

    group: str
    names: str  # FQNs, such as ``model.layers.0-31``.
    layer_class: str
    count: int
    parameters_each: int
    bytes_each: int
    trainable: bool
    checkpointed: bool


@dataclass(frozen=True)
class LayersReport:
    """The findings of `describe`."""

    model_class: str
    parameters: int
    bytes: int
    runs: tuple[Run, ...]
    outside_parameters: int  # Parameters in no layer: embeddings, final norm, head. They form the root unit.
    outside_bytes: int


OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {"required": True, "help": "a preset, a config.json or its folder, or module:function"},
    "--scope": {
        "nargs": "+",
        "group": "model",
        "default": ["all"],
        "help": "groups of layers to checkpoint (default: all)",
    },
    "--layers": {"nargs": "+", "help": "FQNs or globs of the layers, instead of those found"},
    "--dtype": {"help": "dtype of the parameters (default: float32)"},
    "--names": {
        "group": "model",
        "action": "store_true",
        "help": "also print the names that ac= takes, with the MiB and the microseconds of each tensor of a layer",
    },
    "--seq-len": {"type": int, "least": 1, "default": 2048, "help": "of --names: tokens (default: %(default)s)"},
    "--gpu": {"group": "model", "default": "h100-80gb", "help": "of --names: the GPU (default: %(default)s)"},
    "--wide": WIDE,
    "--json": {"metavar": "PATH", "help": "write the report here, as JSON ('-': standard output)"},
}


def first_line(args: argparse.Namespace) -> str:
    """Return the line that is printed before torch is imported."""
    return f"Building {args.model} without weights ..."


def run(args: argparse.Namespace) -> int:
    from nemo_like.models import resolve_model

    if args.json == "-":
        refuse_unread(args, ["wide"], "--json - prints all of it.")
    model = resolve_model(args.model).build(device="meta", dtype=parse_dtype("--dtype", args.dtype))
    report = describe(model, scope=args.scope, layers=args.layers)
    names = names_of(model, args.seq_len, args.gpu, args.layers) if args.names else {}
    width = None if args.wide else screen_width()
    text = f"{to_text(report, width)}\nNext: nemo-like plan --model {args.model} --gpus 8"
    text += "".join(f"\n\n{kind}:\n{Table.of(map(_facts, rows)).text(width)}" for kind, rows in names.items())
    tables = {kind: [as_json(_facts(row)) for row in rows] for kind, rows in names.items()}
    print_report(args, text, lambda: json.dumps(asdict(report) | ({"names": tables} if args.names else {}), indent=2))
    return 0


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a layer that a list can save, and the time that this buys."""

    names: tuple[str, ...]
    bytes: int
    seconds: float  # Of the operator that makes it, by the roofline.


def names_of(
    model: nn.Module, seq_len: int, gpu: str, layers: Iterable[str] | None = None
) -> dict[str, list[NamedTensor]]:
    """Return the tensors with names of each kind of layer, in bfloat16, the most seconds for a byte first.

    Raises:
        ValueError: as `nemo_like.plan_for`, for a model that cannot be traced.
    """
    from nemo_like.job import Job
    from nemo_like.planning.predict import step_of

    # On two ranks, whose FSDP2 casts the parameters as in a real job; a rank by itself computes under autocast.
    step, _ = step_of(model, Job.of(gpu=gpu, world_size=2, precision="bf16", ac="none", layers=layers), seq_len)
    tables = {}
    for problem in step.query().stages[0].part.problems:
        by_name: dict[str, list[int]] = {}
        for k, record in enumerate(problem.records[: problem.reachable]):
            if record.names and record.bytes:
                by_name.setdefault(problem.titles.get(k, record.names[0]), []).append(k)
        rows = [
            NamedTensor(
                (name, *dict.fromkeys(other for k in numbers for other in problem.records[k].names if other != name)),
                sum(problem.records[k].bytes for k in numbers),
                sum(problem.seconds[k] for k in numbers),
            )
            for name, numbers in by_name.items()
        ]
        tables[problem.trace.name] = sorted(rows, key=lambda row: -row.seconds / row.bytes)
    return tables


def _facts(row: NamedTensor) -> list[Fact]:
    micro, mib = 1e6 * row.seconds, row.bytes / (1 << 20)
    return [
        Fact("name", row.names[0], Column("name", left=True)),
        Fact("bytes", row.bytes, Column("MiB"), lambda size: f"{size / (1 << 20):.2f}"),
        Fact("seconds", row.seconds, Column("us"), lambda seconds: f"{1e6 * seconds:.0f}"),
        Fact("", f"{micro / mib:.1f}", Column("us/MiB")),
        Fact("other_names", list(row.names[1:]), Column("also", left=True, least=20), ", ".join),
    ]


def describe(model: nn.Module, scope: str | Iterable[str] = "all", layers: Iterable[str] | None = None) -> LayersReport:
    """The layers of `model` as a report. Errors as in `find_layers` and `select_layers`."""
    from nemo_like.layers import find_layers, select_layers

    layers_found = find_layers(model, layers)
    chosen = {layer.fqn for layer in select_layers(layers_found, scope)}
    inside = {id(parameter) for layer in layers_found for parameter in layer.module.parameters()}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    return LayersReport(
        model_class=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        bytes=sum(parameter.nbytes for parameter in model.parameters()),
        runs=tuple(_runs(layers_found, chosen)),
        outside_parameters=sum(parameter.numel() for parameter in outside),
        outside_bytes=sum(parameter.nbytes for parameter in outside),
    )


def _runs(layers_found: Iterable[Layer], chosen: set[str]) -> Iterable[Run]:
    """Yield the layers, with neighbours that differ only in their index put together."""
    from nemo_like.layers import is_frozen

    members: dict[tuple, list[str]] = {}
    for layer in layers_found:
        parent, _, index = layer.fqn.rpartition(".")
        key = (
            layer.group,
            parent,
            type(layer.module).__name__,
            sum(parameter.numel() for parameter in layer.module.parameters()),
            sum(parameter.nbytes for parameter in layer.module.parameters()),
            not is_frozen(layer.module),
            layer.fqn in chosen,
        )
        members.setdefault(key, []).append(index)
    for (group, parent, name, numel, nbytes, trainable, checkpointed), indices in members.items():
        names = f"{parent}.{_ranges(indices)}" if parent else _ranges(indices)
        yield Run(group, names, name, len(indices), numel, nbytes, trainable, checkpointed)


def _ranges(indices: list[str]) -> str:
    """``"0-3,5"`` from the list indices of layers; names that are not numbers as they are.

    >>> _ranges(["0", "1", "2", "5"])
    '0-2,5'
    """
    spans: list[list[str]] = []
    for index in indices:
        if spans and index.isdigit() and spans[-1][-1].isdigit() and int(index) == int(spans[-1][-1]) + 1:
            spans[-1][1:] = [index]
        else:
            spans.append([index])
    return ",".join("-".join(span) for span in spans)


# The column "checkpointed", by `Run.checkpointed` and `Run.trainable`.
_CHECKPOINTED = {
    (True, True): "yes",
    (True, False): "if used",
    (False, True): "not in scope",
    (False, False): "not in scope",
}


def to_text(report: LayersReport, width: int | None = None) -> str:
    """Return the report for a screen of `width` columns (None: as wide as it gets)."""
    unit = ByteUnit.for_sizes([*(item.bytes_each for item in report.runs), report.outside_bytes])
    columns = (
        Column("group", left=True),
        Column("layers", left=True, least=28),
        Column("class", 3, left=True),
        Column("count", 2),
        Column("parameters each"),
        Column(f"{unit.name} each", 1),
        Column("FSDP unit", 4, left=True),
        Column("checkpointed", left=True),
    )
    rows = [
        (
            item.group,
            item.names,
            item.layer_class,
            str(item.count),
            parameters_word(item.parameters_each),
            unit.number(item.bytes_each),
            "own",
            _CHECKPOINTED[item.checkpointed, item.trainable],
        )
        for item in report.runs
    ]
    outside = (parameters_word(report.outside_parameters), unit.number(report.outside_bytes))
    table = Table(columns, (*rows, ("", "(outside layers)", "", "1", *outside, "root", "no")))
    counts = {group: sum(i.count for i in report.runs if i.group == group) for group in (i.group for i in report.runs)}
    first = (
        f"{report.model_class}: {parameters_word(report.parameters)} parameters, "
        f"{byte_word(report.bytes)}; layers: "
        f"{', '.join(f'{count} {group}' for group, count in counts.items())}."
    )
    lines = [paragraph(first, width), "", table.with_note(width=width)]
    if any(item.checkpointed and not item.trainable for item in report.runs):
        lines.append(
            paragraph("if used: the layer is frozen, and checkpointed where a gradient flows through it.", width)
        )
    return "\n".join(lines) + "\n"
