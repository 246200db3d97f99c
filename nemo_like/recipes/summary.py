"""The summary of a run that ``--json`` writes."""

from __future__ import annotations

import dataclasses
import platform
from importlib import metadata
from typing import Any

import torch

from nemo_like import __version__
from nemo_like.recipes.job import TrainingJob
from nemo_like.recipes.progress import memory_kind


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
    """What the run ran on."""
    found = {"nemo_like": __version__, "python": platform.python_version()}
    found |= {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("transformers", "tokenizers", "peft", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
