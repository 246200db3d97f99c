"""`nemo-like pretrain`: the job `nemo_like.recipes.pretrain`, also under ``torchrun -m nemo_like pretrain``."""

from __future__ import annotations

import argparse

from nemo_like._util.option_fields import add_arguments as add_options
from nemo_like._util.option_fields import read_options
from nemo_like.recipes.options import PretrainOptions

EXAMPLES = PretrainOptions.examples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_options(parser, PretrainOptions)


def run(args: argparse.Namespace) -> int:
    """Run the job on this rank; its exit code."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from nemo_like.recipes.pretrain import run as run_job

    return record(run_job)(read_options(PretrainOptions, args)) or 0
