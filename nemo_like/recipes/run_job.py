"""From options to an exit code: the ranks join, one job runs on them, and every error ends all of them with its reason."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from nemo_like._util.console import start_logging
from nemo_like._util.extras import MissingExtraError
from nemo_like._util.json_file import write_json
from nemo_like.distributed import launch
from nemo_like.distributed.weights.sources import CheckpointUnreadableError
from nemo_like.recipes.agree import OtherRankError, Ranks
from nemo_like.recipes.job import TrainingJob
from nemo_like.recipes.job_checkpoint import CheckpointError, writing
from nemo_like.recipes.loss import DivergedError
from nemo_like.recipes.memory_advice import MemoryRanOutError
from nemo_like.recipes.progress import memory_peak
from nemo_like.recipes.run_options import RunOptions
from nemo_like.recipes.summary import summarise

BAD_INPUT = 2
"""Exit code for options, data or checkpoints that cannot be used, for a loss that is no longer finite, and where
memory runs out."""

_REPORTED = (
    ValueError,
    MissingExtraError,
    CheckpointError,
    CheckpointUnreadableError,
    DivergedError,
    OtherRankError,
    MemoryRanOutError,
)


def run_on_ranks(options: RunOptions, train: Callable[[Any, Ranks], int]) -> int:
    """Run `train(options, ranks)` on every rank; the process's exit code: 0, `BAD_INPUT`, or 128 + the signal that
    stopped it."""
    start_logging()
    try:
        # An error leaves through `joined`, which then waits for no other rank, and is reported outside of it.
        with joined(options) as ranks:
            return train(options, ranks)
    except _REPORTED as error:
        print(f"[rank {launch.rank()}] error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"[rank {launch.rank()}] interrupted outside of training", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


def run_job(job: TrainingJob) -> int:
    """Run a job that was built, on every rank; write its result, unless a signal stopped it, and its summary; the exit
    code."""
    options, ranks = job.options, job.ranks
    job.run()
    peaks = ranks.gather(memory_peak(ranks.device))
    if not job.interrupted:
        job.save_result()
    if options.json is not None:
        with ranks.together("writing the summary"), writing(options.json):
            if ranks.rank == 0:
                write_json(options.json, summarise(job, peaks))
    return 128 + job.interrupted if job.interrupted else 0


@contextmanager
def joined(options: RunOptions) -> Iterator[Ranks]:
    """This process's `Ranks`, with the process group where a launcher started more than one rank."""
    device = launch.init_distributed(None if options.device == "auto" else options.device)
    world_size, rank = launch.world_size(), launch.rank()
    axes = {"tp": 1, "cp": 1, "pp": 1} | dict(options.axes)
    try:
        sizes = {f"--{axis}": size for axis, size in axes.items()}
        sizes["--pp times --cp times --tp"] = axes["pp"] * axes["cp"] * axes["tp"]
        for name, size in sizes.items():
            if world_size % size:
                raise ValueError(f"{name} is {size}, which does not divide the {world_size} rank(s).")
        control = dist.new_group(backend="gloo") if world_size > 1 else None
        yield Ranks(rank, world_size, device, axes["tp"], axes["cp"], axes["pp"], control)
    finally:
        launch.shutdown()
