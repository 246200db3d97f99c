"""From options to an exit code: the ranks join, one job runs on them, and every error ends all of them with its reason."""

from __future__ import annotations

import dataclasses
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from nemo_like import __version__
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
from nemo_like.recipes.progress import memory_kind, memory_peak
from nemo_like.recipes.run_options import RunOptions

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


# The summary of a run that ``--json`` writes.


def summarise(job: TrainingJob, peak_bytes: list[int]) -> dict[str, Any]:
    """The run as JSON values. Losses are nats per token (or byte); `peak_bytes` has one number per rank."""
    return {
        "losses": job.log.losses,
        "first_step": job.first_step,
        "eval_losses": job.eval_losses,
        **job.facts(),
        "peak_bytes": peak_bytes,
        "peak_bytes_are": memory_kind(job.ranks.device),
        "tokens_per_second": job.tokens_per_second,
        "mfu": job.mfu,
        "mfu_is": job.utilisation.words,
        "ac": job.options.ac,
        "fit": None if job.fitted is None else {"options": job.fitted.options, **job.fitted.predicted},
        "strategy": job.strategy,
        "world_size": job.ranks.world_size,
        "interrupted": bool(job.interrupted),
        "options": dataclasses.asdict(job.options),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of what the run ran on."""
    versions_found = {"nemo_like": __version__, "python": platform.python_version()}
    versions_found |= {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("transformers", "tokenizers", "peft", "numpy"):
        try:
            versions_found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions_found[name] = "not installed"
    return versions_found
