"""`python -m tests.tools.benchmarks SUITE`: how fast we plan, set up and check; published and predicted steps."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from nemo_like._util.console import examples, start_logging, write_text
from nemo_like._util.help_parser import HelpParser
from nemo_like.comparison import surroundings
from tests.tools.benchmarks.check import CHECK
from tests.tools.benchmarks.overhead import OVERHEAD
from tests.tools.benchmarks.planning import PLANNING
from tests.tools.benchmarks.public_numbers import PUBLIC
from tests.tools.benchmarks.random_jobs import run as random_jobs
from tests.tools.benchmarks.scale import SCALE
from tests.tools.benchmarks.suite import MODEL, markdown
from tests.tools.benchmarks.verify import VERIFY

PROGRAM = "python -m tests.tools.benchmarks"

SUITES = {
    "public": PUBLIC,
    "planning": PLANNING,
    "check": CHECK,
    "scale": SCALE,
    "verify": VERIFY,
    "overhead": OVERHEAD,
}
"""The suites, by name."""
RANDOM = "random_jobs"
"""Measures nothing: its rows are the jobs whose answers differ."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one suite and return the exit status: 0 done, 1 random jobs differ, 2 bad input (one line says what), 130
    interrupted."""
    start_logging()
    args = make_parser().parse_args(argv)
    try:
        if args.suite == RANDOM:
            return 1 if random_jobs(args.jobs, args.seed) else 0
        suite = SUITES[args.suite]
        measured = suite.run(args)
        measured.about |= surroundings(torch.device("cpu"))
        if args.json is not None:
            write_text(args.json, json.dumps(asdict(measured), indent=2, default=str))
        print(f"{measured.title}\n\n{markdown(suite.columns, measured.rows)}\n")
        print(", ".join(f"{key}: {value}" for key, value in measured.about.items()), *measured.notes, sep="\n")
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, ImportError, OSError, NotImplementedError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """A suite's name, then its options."""
    suites = "\n".join(f"  {name:<10} {suite.help}" for name, suite in SUITES.items())
    suites += f"\n  {RANDOM} whether a plan, fit and a fake rank agree about jobs that are drawn"
    parser = HelpParser(
        prog=PROGRAM, description=f"suites:\n{suites}", epilog=examples(PROGRAM, ("public", "overhead"))
    )
    parser.add_argument("suite", group="output", choices=[*SUITES, RANDOM], help="what to measure")
    parser.add_argument("--jobs", group="output", type=int, default=100, help=f"{RANDOM}: how many jobs")
    parser.add_argument("--seed", type=int, default=0, help=f"{RANDOM}: of the first job, which the next ones follow")
    parser.add_argument("--model", default=MODEL, help="a preset, instead of those of the suite")
    parser.add_argument("--batch-size", type=int, default=2, help="verify: samples")
    parser.add_argument("--seq-len", type=int, default=256, help="verify: tokens per sample")
    parser.add_argument("--repeats", type=int, default=5, help="steps that are measured")
    parser.add_argument("--compile", group="training", nargs="*", default=["aot_eager"], help="overhead: back ends")
    parser.add_argument("--against", group="output", metavar="TREE", help="planning: another checkout")
    parser.add_argument("--json", metavar="PATH", help="write everything here, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
