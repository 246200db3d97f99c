"""`nemo-like pretrain`: the job `nemo_like.recipes.pretrain`, also under ``torchrun -m nemo_like pretrain``."""

from __future__ import annotations

import argparse

from nemo_like.recipes import options
from nemo_like.recipes.command_line import add_arguments as add_options
from nemo_like.recipes.command_line import read_options

EXAMPLES = options.EXAMPLES["pretrain"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_options(parser, options.PretrainOptions)


def run(args: argparse.Namespace) -> int:
    """Run the job on this rank; its exit code."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from nemo_like.recipes.loop import run_on_ranks
    from nemo_like.recipes.pretrain import Pretraining

    return record(run_on_ranks)(read_options(options.PretrainOptions, args), Pretraining) or 0
