"""What is watched of a model that was planned: a batch that is larger, and a first step that peaks elsewhere."""

from __future__ import annotations

import torch
from torch import nn

from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.job import Job
from nemo_like.planning.first_step import watch_first_step
from nemo_like.planning.larger_batch import size_watch, warn_of_larger_batches


def watch(model: nn.Module, job: Job, device: torch.device) -> None:
    """Have `model`, which trains as `job` on `device`, report once what differs from what was planned. On rank zero."""
    plan = job.ac if isinstance(job.ac, Plan) else None
    sizes = size_watch(plan, job.planned_tokens)
    if sizes is not None:
        warn_of_larger_batches(model, sizes)
    on_host = job.offload.mode != "none" or (job.fsdp is not None and job.fsdp.cpu_offload)
    if plan is not None and not on_host:
        watch_first_step(model, plan, device)
