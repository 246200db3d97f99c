"""Advice of the planner where a training job runs out of memory."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from nemo_like._util.console import as_flag
from nemo_like._util.words import write_bytes
from nemo_like.distributed.ranks import Ranks
from nemo_like.models import ModelSource
from nemo_like.options import ADAMW
from nemo_like.planning.advise import flag_changes, saving, smaller_budget, where_memory_runs_out
from nemo_like.planning.devices import Device, device_at_hand
from nemo_like.planning.planner import lower_peaks, peak_under
from nemo_like.planning.query import PlanQuery
from nemo_like.recipes.options import PretrainOptions


def _flags(values: Mapping[str, Any]) -> str:
    return " ".join(as_flag(name, value) for name, value in values.items())


class MemoryRanOutError(RuntimeError):
    """A step does not fit; the message has changes that would lower its peak."""


@dataclass
class AdvisedStep:
    """A step of a job, as the planner sees it under any of its options."""

    source: ModelSource
    options: PretrainOptions
    ranks: Ranks
    device: Device | None = None  # default: the one that `ranks` train on

    def query(self, options: PretrainOptions) -> PlanQuery:
        """Return the query for the bytes that a rank needs."""
        if self.ranks.pp > 1:
            raise ValueError("nemo-like plan --pp predicts the peaks of a pipeline's stages")
        device = self.device or device_at_hand(self.ranks.device.type)
        return PlanQuery.from_model(
            self.source.build("meta", torch.float32),
            options.planned_input(options.rows(self.ranks.data_ranks)),
            options.job(world_size=self.ranks.world_size, gpu=device),
        )

    def ways_out(self) -> list[str]:
        """Return the changes of options that lower the peak of a rank, the largest first; then all of them together."""
        options, query, ranks = self.options, self.query(self.options), self.ranks
        job, now, double = query.job, peak_under(query).total, 2 * options.grad_accum
        changes: list[tuple[str, Any]] = [
            ("ac", smaller_budget(job.ac, query.device)),
            ("ac", "full"),
            ("precision", "bfloat16"),
            ("strategy", "fsdp2"),
        ]
        if options.global_batch % (double * ranks.data_ranks) == 0:
            changes.append(("grad_accum", double))
        tried = [{name: value} for name, value in changes if value not in (None, getattr(options, name))]
        others = flag_changes(job, vars(options).keys() - {"ac"})
        tried += [values for values, _ in others if values.get("optimizer", ADAMW[0]) in ADAMW]
        lowered = lower_peaks(now, ((values, self.query(replace(options, **values))) for values in tried))
        ways = [saving(_flags(values), saved) for values, saved in lowered]
        both = {name: value for values, _ in reversed(lowered) for name, value in values.items()}  # the best last
        if len(both) > 1:
            peak = write_bytes(peak_under(self.query(replace(options, **both))).total)
            ways.append(f"a peak of {peak} in place of {write_bytes(now)} with {_flags(both)}")
        return ways or ["a smaller --seq-len, or more ranks to shard over"]


def advice_on_memory(step: AdvisedStep) -> AbstractContextManager[None]:
    """Raise `MemoryRanOutError` with changes of `step`, where memory runs out inside."""

    def told(error: RuntimeError, ways: list[str]) -> MemoryRanOutError:
        reason = str(error).strip().splitlines()[0]
        return MemoryRanOutError(f"Memory ran out: {reason} Changes that lower the peak: {'; '.join(ways)}.")

    return where_memory_runs_out(
        step.ways_out, "no plan can be made of this model ({}); try --ac full and a larger --grad-accum", told
    )
