"""``nemo-like explain``: the parts of a GPU's memory, by a recorded snapshot."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from nemo_like.explaining.explanation import explain
from nemo_like.explaining.snapshot import SnapshotError

EXAMPLES = ("memory_snapshot.pickle", "memory_snapshot.pickle --device 3 --json explained.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="what torch.cuda.memory._dump_snapshot wrote, also gzipped")
    parser.add_argument("--device", type=int, metavar="N", help="the number of the GPU (default: the one with most)")
    parser.add_argument("--json", metavar="PATH", help="write the bytes there as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the parts at the peak; return 2 where the file is not a snapshot."""
    try:
        explanation = explain(args.file, device=args.device)
    except (SnapshotError, OSError) as error:
        print(f"nemo-like explain: {error}", file=sys.stderr)
        return 2
    print(explanation)
    if args.json:
        Path(args.json).write_text(json.dumps(explanation.to_dict(), indent=2) + "\n", encoding="utf-8")
    return 0
