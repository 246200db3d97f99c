"""`nemo-like trace`: what every operator of a checkpointed layer costs and saves, and whether backward reads it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from nemo_like._util.console import refuse_unread
from nemo_like._util.table import ByteUnit, Column, Table, paragraph, percent, screen_width, three_digits
from nemo_like.commands import VOCAB_SIZE
from nemo_like.options import normalise, parse_dtype

if TYPE_CHECKING:  # the command imports torch only when it runs
    import torch

EXAMPLES = (
    "--model llama-small --ac selective",
    "--model llama3-1b --ac 50% --device cuda --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="llama-tiny", help="a preset, a config.json or its folder, or module:function"
    )
    parser.add_argument("--ac", default="selective", help="the mode, or a budget such as 50%% (default: selective)")
    parser.add_argument("--batch-size", type=int, default=1, help="samples of the traced forward")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens per sample")
    parser.add_argument("--vocab-size", type=int, help=VOCAB_SIZE)
    parser.add_argument("--device", default="cpu", help="where the forward runs (default: cpu)")
    parser.add_argument("--dtype", default=None, help="dtype of the parameters (default: float32)")
    parser.add_argument("--all-ops", action="store_true", help="also operators that are neither tracked nor have FLOPs")
    parser.add_argument("--wide", action="store_true", help="print all columns, however narrow the screen is")
    parser.add_argument("--json", action="store_true", help="print JSON")


def first_line(args: argparse.Namespace) -> str:
    """Return the line that is printed before torch is imported."""
    return f"Tracing {args.model} ..."


def run(args: argparse.Namespace) -> int:
    """Run one forward of the model with its layers checkpointed, and print each distinct region once."""
    if args.json:
        refuse_unread(args, ["all_ops", "wide"], "--json prints all of them.")
    width = None if args.wide else screen_width()
    regions = trace_model(args, dtype=parse_dtype("--dtype", args.dtype))
    sys.stdout.write(json.dumps(regions, indent=2) + "\n" if args.json else to_text(regions, args.all_ops, width))
    return 0


def trace_model(args: argparse.Namespace, dtype: torch.dtype | None = None) -> list[dict[str, Any]]:
    """The traces of a model's regions as plain values, equal ones once, with their ``count`` and names.

    Raises:
        ValueError: the mode makes no regions; a bad model, mode or size.
    """
    from nemo_like._util.tensors import split_sample
    from nemo_like.activation_checkpointing.op_trace import table_of, trace_regions
    from nemo_like.commands.plan_inputs import sample_for
    from nemo_like.distributed.launch import checked_device
    from nemo_like.models import resolve_model
    from nemo_like.parallelizer import parallelize

    ac, device = args.ac, args.device
    if normalise(ac) == "sequential":
        raise ValueError(
            "--ac is 'sequential', whose regions are several layers' calls each: there is no table of one layer to print. "
            "Trace ac='full', which recomputes the same operators, layer by layer."
        )
    checked_device(device)
    source = resolve_model(args.model)
    built, source = source.built(device=device, dtype=dtype)
    sample = sample_for(source, args, device, dtype)
    built = parallelize(built, strategy="single", ac=ac, sample_input=sample)
    with trace_regions() as trace:
        positions, keywords = split_sample(sample)
        built(*positions, **keywords)
    if not trace.regions:
        raise ValueError(f"ac is {ac!r}: no layer of {source.name} is checkpointed, so there is nothing to trace.")
    distinct: dict[str, dict[str, Any]] = {}
    for region in trace.regions:
        table = table_of(region)
        key = json.dumps({**table, "region": ""})
        if key in distinct:
            distinct[key]["count"] += 1
            distinct[key]["regions"].append(region.name)
        else:
            distinct[key] = {"count": 1, "regions": [region.name], **table}
    for table in distinct.values():
        del table["region"]
    return list(distinct.values())


def to_text(regions: list[dict[str, Any]], all_ops: bool = False, width: int | None = None) -> str:
    """Return two tables for each region, for a screen of `width` columns (None: as wide as it gets)."""
    sizes = [total["bytes"] for region in regions for total in region["totals"].values()]
    unit = ByteUnit.of([*sizes, *(row["kept_bytes"] for region in regions for row in region["rows"])])
    parts = []
    for region in regions:
        names = region["regions"]
        more = f" and {len(names) - 1} more like it, up to {names[-1]}" if len(names) > 1 else ""
        rows = [row for row in region["rows"] if all_ops or row["decision"] != "not tracked" or row["flops"]]
        table = _operators(rows, unit)
        notes = [f"{row['op']} ({row['decision']}): {row['note']}." for row in rows if row["note"]]
        parts += [
            paragraph(f"{names[0]}{more}:", width),
            "\n".join([table.with_note(width=width), *(paragraph(note, width) for note in notes)]),
            _totals(region, unit).text(width),
        ]
    return "\n\n".join(parts) + "\n"


def _operators(rows: list[dict[str, Any]], unit: ByteUnit) -> Table:
    columns = (
        Column("operator", left=True, least=28),
        Column("decision", left=True),
        Column("calls"),
        Column(f"saved {unit.name}"),
        Column("B/token", 3),
        Column("MFLOPs", 1),
        Column("read", 2),
    )
    cells = (
        (
            row["op"],
            row["decision"],
            str(row["count"]),
            unit.number(row["kept_bytes"]),
            three_digits(row["kept_bytes_per_token"]),
            three_digits(row["flops"] / 1e6),
            f"{row['read']}/{row['count']}",
        )
        for row in rows
    )
    return Table(columns, tuple(cells))


def _totals(region: dict[str, Any], unit: ByteUnit) -> Table:
    """Return what the region saves and recomputes without checkpointing, with all of it, and as asked."""
    columns = (
        Column("policy", left=True),
        Column(f"saved {unit.name}"),
        Column("recompute MFLOPs"),
        Column("of forward"),
    )
    cells = (
        (
            name,
            unit.number(total["bytes"]),
            three_digits(total["replay_flops"] / 1e6),
            percent(total["replay_flops"] / region["forward_flops"] if region["forward_flops"] else 0.0),
        )
        for name, total in region["totals"].items()
    )
    return Table(columns, tuple(cells))
