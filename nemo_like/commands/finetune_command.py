"""`nemo-like finetune`: the job `nemo_like.recipes.finetune`, also under ``torchrun -m nemo_like finetune``."""

from __future__ import annotations

import argparse

from nemo_like.recipes import options
from nemo_like.recipes.command_line import add_arguments as add_options
from nemo_like.recipes.command_line import read_options

EXAMPLES = options.EXAMPLES["finetune"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_options(parser, options.FinetuneOptions)


def run(args: argparse.Namespace) -> int:
    """Run the job on this rank; its exit code."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from nemo_like.recipes.finetune import FineTuning
    from nemo_like.recipes.loop import run_on_ranks

    return record(run_on_ranks)(read_options(options.FinetuneOptions, args), FineTuning) or 0
