"""Errors of predictions against published measurements."""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import nn

from nemo_like._util.table import percent
from nemo_like.distributed.expert.split_experts import has_experts
from nemo_like.job import Job

LONG = 32_768  # Tokens of a sequence from which on a job counts as a long one.
DENSE = "dense models"


def kind_of(model: nn.Module, job: Job, sample: object) -> str:
    """Return the kind of a job, as in ``accuracy.json``; of several, the one whose errors are largest.

    Args:
        sample: tokens of a sequence; or an input with token ids.
    """
    ids = sample.get("input_ids") if isinstance(sample, Mapping) else sample
    seq_len = ids.shape[-1] if isinstance(ids, torch.Tensor) else ids
    kinds = {
        "mixtures": has_experts(model),
        "long sequences": isinstance(seq_len, int) and seq_len >= LONG,
        "pipelines": job.pp.size > 1,
        "LoRA": any(not parameter.requires_grad for parameter in model.parameters()),
    }
    known = _errors()["kinds"]
    return max(
        (kind for kind, is_one in kinds.items() if is_one), key=lambda kind: known[kind]["median"], default=DENSE
    )


@cache
def _errors() -> dict[str, Any]:
    return json.loads(resources.files("nemo_like.planning").joinpath("accuracy.json").read_text(encoding="utf-8"))


def accuracy_words(kind: str = DENSE) -> str:
    """Return the median errors of the table of published steps (docs/evidence/public-numbers.md), in a line.

    Errors of speed are those of jobs of this `kind`, of sources that no constant was chosen by.

    >>> accuracy_words().partition(",")[0]
    'Off by: half of 64 published peaks within 3.1 %'
    """
    errors = _errors()
    peaks, speeds, after = errors["peaks"], errors["kinds"][kind], errors["calibrated"]
    return (
        f"Off by: half of {peaks['rows']} published peaks within {percent(peaks['median'])}, half of {speeds['rows']} "
        f"speeds of {kind} within {percent(speeds['median'])}; after --calibrate-from LOG half of {after['rows']} within "
        f"{percent(after['median'])}."
    )
