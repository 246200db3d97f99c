"""``nemo-like explain``: the parts of a GPU's memory, by a recorded snapshot, or the causes that a message shows."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_like._util.json_file import write_json
from nemo_like.explaining.explanation import explain
from nemo_like.explaining.messages import OutOfMemory, causes, read_message, words
from nemo_like.explaining.snapshot import SnapshotError

EXAMPLES = ("memory_snapshot.pickle", "memory_snapshot.pickle --device 3 --json explained.json", "train.log")
_LONGEST = 64 << 20
"""Bytes of a log that are looked through for a message, its last ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        help="what torch.cuda.memory._dump_snapshot wrote, also gzipped, or a text with an out-of-memory message (-: "
        "standard input)",
    )
    parser.add_argument("--device", type=int, metavar="N", help="the number of the GPU (default: the one with most)")
    parser.add_argument("--json", metavar="PATH", help="write the bytes there as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the parts at the peak, or the causes of a message."""
    lines, numbers = _explained(args)
    print(lines)
    if args.json:
        write_json(args.json, numbers)
    return 0


def _explained(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the lines to print, and the numbers for JSON."""
    if args.file == "-":
        message = read_message(sys.stdin.read()[-_LONGEST:])
        if message is None:
            raise SnapshotError("Standard input has no out-of-memory message. Give the file of a snapshot, or a log.")
        return _of_message(message)
    try:
        explanation = explain(args.file, device=args.device)
    except SnapshotError:
        with open(args.file, "rb") as file:
            file.seek(max(0, Path(args.file).stat().st_size - _LONGEST))
            message = read_message(file.read().decode(errors="replace"))
        if message is None:
            raise
        return _of_message(message)
    return str(explanation), explanation.to_dict()


def _of_message(message: OutOfMemory) -> tuple[str, dict[str, Any]]:
    return "\n".join(words(message)), asdict(message) | {"causes": [asdict(cause) for cause in causes(message)]}
