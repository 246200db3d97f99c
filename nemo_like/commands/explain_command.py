"""``nemo-like explain``: the contents of a GPU's memory, by a snapshot, a message or the number of nvidia-smi."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_like._util.console import refuse_unread, start_logging
from nemo_like.commands import print_report, step_options
from nemo_like.commands.step_options import asked_job, check_step_options, traced_step
from nemo_like.explaining.explain import LONGEST, explained_message, explained_source
from nemo_like.explaining.messages import read_message
from nemo_like.explaining.snapshot_file import SnapshotError, read_snapshot, write_stripped
from nemo_like.options import parse_bytes

if TYPE_CHECKING:  # a file alone needs no torch
    from nemo_like.explaining.planned import PlannedJob

EXAMPLES = (
    "memory_snapshot.pickle",
    "memory_snapshot.pickle --device 3 --json explained.json",
    "memory_snapshot.pickle --model llama3-8b --gpus 8 --ac full",
    "--used 71GiB --model llama3-8b --gpus 8",
    "train.log",
    "before.pickle after.pickle",
    "snapshots_of_ranks",
    "memory_snapshot.pickle --strip to_send.pickle",
)
_OWN = ("file", "used", "device", "json", "strip", "model", "help")


OPTIONS: dict[str, dict[str, Any]] = {
    "file": {
        "nargs": "*",
        "help": "a snapshot of torch.cuda.memory._dump_snapshot, also gzipped, or a text with an out-of-memory message "
        "(-: standard input); several snapshots, or the folder of a job's ranks, are put into one table",
    },
    "--used": {"help": "memory in use by nvidia-smi (71GiB): with a file, or with --model alone"},
    "--device": {"type": int, "metavar": "N", "help": "the number of the GPU (default: the one with most)"},
    "--json": {"metavar": "PATH", "help": "write the bytes here, as JSON ('-': standard output)"},
    "--strip": {
        "metavar": "PATH",
        "help": "write the snapshot there without paths and text, for sending, and nothing else",
    },
    "--ac": {
        "group": "memory",
        "default": "none",
        "help": "checkpointing that ran: none, full, selective or a budget (default: %(default)s)",
    },
    **step_options.OPTIONS,
}


def run(args: argparse.Namespace) -> int:
    """Print the parts at the peak, or the causes of a message."""
    used = None if args.used is None else parse_bytes(args.used, "--used")
    missing = next((file for file in args.file if file != "-" and not Path(file).exists()), None)
    if missing is not None:
        raise ValueError(f"{missing!r} does not exist. Give a snapshot of torch.cuda.memory._dump_snapshot, or a log.")
    if len(args.file) > 1 or any(map(os.path.isdir, args.file)):
        return _several(args)
    args.file = next(iter(args.file), None)
    if args.file is None:
        if used is None or args.model is None:
            raise ValueError("There is nothing to explain. Give a file, or --used with --model.")
        refuse_unread(args, ["device", "strip"], "it is of a file.")
    elif args.file != "-" and not Path(args.file).is_file():
        raise ValueError(f"{args.file!r} is not a file. Give a snapshot of torch.cuda.memory._dump_snapshot, or a log.")
    if args.strip:
        if args.file == "-":
            raise ValueError("--strip writes a snapshot without names. Give the file of one.")
        refuse_unread(args, ["json", "device", "used", "model"], "--strip writes the file, and nothing else.")
        write_stripped(read_snapshot(args.file), args.strip)
        print(f"Written to {args.strip}: sizes, order, functions, and files of packages alone.")
        return 0
    planned = _planned(args)
    if args.file == "-":
        pieces = iter(lambda: sys.stdin.buffer.read(1 << 20), b"")
        message = read_message(b"".join(deque(pieces, LONGEST >> 20)).decode(errors="replace"))
        if message is None:
            raise SnapshotError("Standard input has no out-of-memory message. Give the file of a snapshot, or a log.")
        explanation = explained_message(message, planned)
    else:
        source: Any = used if args.file is None else Path(args.file)
        explanation = explained_source(source, planned, device=args.device, used=used)
    print_report(args, str(explanation), lambda: json.dumps(explanation.to_dict(), indent=1))
    return 0


def _several(args: argparse.Namespace) -> int:
    """Print several snapshots in one table."""
    plan = [action.dest for action in args.own._actions if action.dest not in ("file", "device", "json", "help")]
    refuse_unread(args, plan, "it is of one file, and several are compared with each other.")
    from nemo_like.explaining.several import explain_files

    explained = explain_files(args.file, device=args.device)
    print_report(args, str(explained), lambda: json.dumps(explained.to_dict(), indent=1))
    return 0


def _planned(args: argparse.Namespace) -> PlannedJob | None:
    """Return the job that ``--model`` and the options of a plan state; None: there is no ``--model``."""
    if args.model is None:
        refuse_unread(
            args,
            [action.dest for action in args.own._actions if action.dest not in _OWN],
            "it is of a plan, which takes --model.",
        )
        return None
    for name in ("world_size", "seq_len", "batch_size"):
        if not isinstance(getattr(args, name), int):
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)!r}. Give the number that ran.")
    check_step_options(args)
    start_logging()
    from nemo_like.explaining.planned import PlannedJob
    from nemo_like.models import resolve_model

    query, step, _ = traced_step(args, resolve_model(args.model), asked_job(args).change(ac=args.ac))
    return PlannedJob(step, query)
