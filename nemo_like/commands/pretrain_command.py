"""`nemo-like pretrain`: the job `nemo_like.recipes.pretrain`, also under ``torchrun -m nemo_like pretrain``."""

import argparse
import os

from nemo_like._util import option_fields
from nemo_like.options.parallel import undivided
from nemo_like.presets import check_model_name
from nemo_like.recipes.options import PretrainOptions

EXAMPLES = PretrainOptions.examples
OPTIONS = option_fields.arguments_of(PretrainOptions)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that can be refused before torch is imported."""
    args.options = option_fields.read_options(PretrainOptions, args)
    check_model_name(args.options.model)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = {name: size for name in ("tp", "cp", "pp") if (size := getattr(args.options, name)) > 1}
    if sizes and (problem := undivided(sizes, ranks, f"the {ranks} rank(s)")):
        raise ValueError(problem)


def first_line(args: argparse.Namespace) -> str:
    """Return the line that is printed before torch is imported."""
    return f"Pretraining {args.options.model} on {args.options.data or 'the standard library'} ..."


def run(args: argparse.Namespace) -> int:
    """Run the job on this rank; its exit code."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from nemo_like.recipes.pretrain import run as run_job

    return record(run_job)(args.options) or 0
