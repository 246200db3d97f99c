"""`nemo-like pretrain`: the job `nemo_like.recipes.pretrain`, also under ``torchrun -m nemo_like pretrain``."""

from __future__ import annotations

import argparse

from nemo_like.recipes.job_options import EXAMPLES, Options, read_options
from nemo_like.recipes.job_options import add_arguments as add_options

__all__ = ["EXAMPLES", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_options(parser, Options)


def run(args: argparse.Namespace) -> int:
    """Run the job on this rank; its exit code."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from nemo_like.recipes.pretrain import train
    from nemo_like.recipes.run_job import run_on_ranks

    return record(run_on_ranks)(read_options(Options, args), train) or 0
