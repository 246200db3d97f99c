"""`nemo-like finetune`: the job `nemo_like.recipes.finetune`, also under ``torchrun -m nemo_like finetune``."""

from __future__ import annotations

import argparse

from nemo_like.recipes.finetune_options import EXAMPLES, FinetuneOptions
from nemo_like.recipes.job_options import add_arguments as add_options
from nemo_like.recipes.job_options import read_options

__all__ = ["EXAMPLES", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_options(parser, FinetuneOptions)


def run(args: argparse.Namespace) -> int:
    """Run the job on this rank; its exit code."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from nemo_like.recipes.finetune import tune
    from nemo_like.recipes.run_job import run_on_ranks

    return record(run_on_ranks)(read_options(FinetuneOptions, args), tune) or 0
