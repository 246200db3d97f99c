"""When memory runs out: which options would have lowered the peak, and by how much, from the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nemo_like._util.console import as_flag
from nemo_like._util.device_work import is_out_of_memory
from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import BudgetError
from nemo_like.flags import changed_flags
from nemo_like.options import ADAMW, MemoryBudget, parse_ac, parse_dtype
from nemo_like.planning.advise import changes, helping
from nemo_like.planning.devices import Device, device_at_hand
from nemo_like.planning.planned_rank import peak_under
from nemo_like.planning.query import PlanQuery
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.options import RunOptions

_LESS = 0.9
"""Share of a budget that did not fit, to try next."""


class MemoryRanOutError(RuntimeError):
    """A step does not fit; the message has what would lower its peak."""


@contextmanager
def advice_on_memory(step: PlannedStep) -> Iterator[None]:
    """Raise with what to change in `step`, where memory runs out inside."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()[0]
        try:
            ways = step.ways_out()
        except (ValueError, NotImplementedError, RuntimeError) as problem:
            ways = [f"no plan can be made of this model ({problem}); try --ac full and a larger --grad-accum"]
        raise MemoryRanOutError(f"Memory ran out: {reason} What lowers the peak: {'; '.join(ways)}.") from error


class PlannedStep:
    """A step of a job, as the planner sees it under any of its options."""

    def __init__(
        self,
        build: Callable[[Any], nn.Module],
        options: RunOptions,
        ranks: Ranks,
        width: int,
        device: Device | None = None,
    ) -> None:
        """`build`: the bare model, on the meta device, that options make. `width`: tokens of the longest row. `device`:
        default, the one that `ranks` train on."""
        self._build, self._options, self._ranks, self._width = build, options, ranks, width
        self._device = device_at_hand(ranks.device.type) if device is None else device

    def ways_out(self) -> list[str]:
        """Changes of options that lower the predicted peak of a rank, the largest first; then all of them together."""
        options = self._options
        now = self.peak(options)
        peaks: dict[str, int] = {}
        tried = dict(self._changes())
        for said, changed in tried.items():
            try:
                peaks[said] = self.peak(replace(options, **changed))
            except BudgetError:  # one that is too small for the change
                continue
        _, ways = helping(now, 0, peaks.items())
        # Of two budgets the one that saves more: two values of one option cannot be taken together.
        lower = sorted((name for name in peaks if peaks[name] < now), key=lambda name: -peaks[name])
        both = {name: value for change in lower for name, value in tried[change].items()}
        if len(both) > 1:
            words = (
                "all of these"
                if len(both) == sum(len(tried[change]) for change in lower)
                else "the best of all of these"
            )
            best = write_bytes(self.peak(replace(options, **both)))
            ways.append(f"a peak of {best} in place of {write_bytes(now)} with {words}")
        return ways or ["a smaller --seq-len, or more ranks to shard over"]

    def peak(self, options: RunOptions) -> int:
        """Bytes that a step of one rank peaks at: under ``--ac full``, ``selective``, a budget, or for any other ``none``.

        Raises:
            BudgetError: no plan fits the budget.
            NotImplementedError: the layers are a pipeline's.
        """
        ranks = self._ranks
        if ranks.pp > 1:
            raise NotImplementedError("peaks of a pipeline's stages are what nemo-like plan --pp predicts")
        job = options.job(world_size=ranks.world_size, gpu=self._device)
        sample = options.planned_input(options.rows(ranks.data_ranks), self._width)
        query = PlanQuery.of(self._build(options), sample, job)
        return peak_under(query).total

    def _changes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what to write on the command line, and the same as options."""
        options, ranks = self._options, self._ranks
        budget = parse_ac(options.ac)
        if isinstance(budget, MemoryBudget):
            smaller = smaller_budget(budget, self._device)
            yield f"--ac {smaller}", {"ac": smaller}
        if options.ac != "full":
            yield "--ac full", {"ac": "full"}
        job = options.job(world_size=ranks.world_size, gpu=self._device)
        for change in changes(job):
            values = changed_flags(job, change.job)
            if values.get("optimizer", ADAMW[0]) not in ADAMW:
                continue  # the job trains with torch's AdamW
            if values.keys() - {"ac"} and all(hasattr(options, name) for name in values):
                yield " ".join(as_flag(name, value) for name, value in values.items()), values
        if options.batch_size % (2 * options.grad_accum * ranks.data_ranks) == 0:
            yield f"--grad-accum {2 * options.grad_accum}", {"grad_accum": 2 * options.grad_accum}
        if parse_dtype("--precision", options.compute) is torch.float32:
            yield "--precision bf16", {"precision": "bfloat16"}
        if options.strategy == "ddp" and ranks.world_size > 1:
            yield "--strategy fsdp2", {"strategy": "fsdp2"}
        yield from options.trains_less.items()


def smaller_budget(budget: MemoryBudget, device: Device) -> str:
    """The budget to try next on `device`, where `budget` was too much."""
    if budget.fraction is not None:
        return f"{budget.fraction * 100 / 2:g}%"
    size = budget.peak_bytes or device.memory_bytes * (budget.device_share or 1.0)
    return write_bytes(int(size * _LESS))
