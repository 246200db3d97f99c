"""`nemo-like finetune`: the job `nemo_like.recipes.finetune`, also under ``torchrun -m nemo_like finetune``."""

import argparse
import os

from nemo_like._util import option_fields
from nemo_like._util.console import flag
from nemo_like.recipes.options import FinetuneOptions

EXAMPLES = FinetuneOptions.examples
OPTIONS = option_fields.arguments_of(FinetuneOptions)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that can be refused before torch is imported."""
    args.options = option_fields.read_options(FinetuneOptions, args)
    for name in ("data", "eval_data"):
        if (path := getattr(args.options, name)) is not None and not os.path.exists(path):
            raise ValueError(f"{flag(name)} is {path!r}, and nothing exists there.")


def first_line(args: argparse.Namespace) -> str:
    """Return the line that is printed before torch is imported."""
    return f"Fine-tuning {args.options.model} on {args.options.data} ..."


def run(args: argparse.Namespace) -> int:
    """Run the job on this rank; its exit code."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from nemo_like.recipes.finetune import run as run_job

    return record(run_job)(args.options) or 0
