"""How a model is cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_like._util.words import check_whole, did_you_mean, normalise
from nemo_like.options.schedule_file import ScheduleFile, is_schedule_file, read_schedule
from nemo_like.options.schedules import SCHEDULE_OBJECTS, SCHEDULES, Schedule


@dataclass(frozen=True)
class PipelineParallel:
    """Deal a model's layers out to `size` ranks. ``pp=2`` means the defaults.

    >>> PipelineParallel(4, schedule="interleaved-1f1b", microbatches=8).stages
    8
    """

    size: int = 1
    """Ranks of one pipeline; must divide the number of ranks."""
    schedule: str = "1f1b"
    """``gpipe`` | ``1f1b`` | ``interleaved_1f1b`` | ``interleaved_zero_bubble`` | ``zbv`` | ``dualpipev``: torch's; or a CSV
    file of torch's, with one line per rank (``0F0,0F1,,0B0``), which says stages and microbatches, too."""
    microbatches: int | None = None
    """Into how many parts `Pipeline.step` cuts a batch. None: twice the number of ranks."""
    stages_per_rank: int | None = None
    """None: 1 for ``gpipe`` and ``1f1b``, else 2; the V-shaped schedules take 2 alone."""
    balance: str | tuple[int, ...] = "time"
    """``"time"``: the stage with the most FLOPs has as few as possible, the head counted; ``"memory"``: the rank that peaks
    highest peaks as low as it can; or how many layers each stage gets, from the first stage on."""
    replay: str = "auto"
    """Where a schedule cuts backward in two: ``"once"`` replays a checkpointed layer in the first half and keeps for the
    second one what that still needs; ``"twice"`` keeps nothing and replays again; ``"auto"``: once, or under a memory budget
    whichever makes the faster plan."""
    split: Callable[[Any, int, int], Any] | None = None
    """For a model that its list of layers does not cut: ``split(model, stage, stages)`` returns the module of one stage. It
    gets a copy of the model's modules with the model's own parameters, which it may take apart; parameters keep the names
    that they have in `model`. A stage's forward is called with what the stage before it returned (a floating-point tensor,
    or a tuple of them), as positions, and with what it names of a microbatch; the last stage's returns the loss."""

    def __post_init__(self) -> None:
        check_whole("pp", self.size, 1, "ranks")
        if is_schedule_file(self.schedule):
            self._take_file(read_schedule(str(self.schedule)))
            return
        object.__setattr__(
            self, "schedule", normalise(self.schedule) if isinstance(self.schedule, str) else self.schedule
        )
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"PipelineParallel.schedule is {self.schedule!r}; it must be one of {', '.join(SCHEDULES)}."
                + did_you_mean(str(self.schedule), SCHEDULES)
            )
        if self.stages_per_rank is None:
            object.__setattr__(self, "stages_per_rank", self.facts.default_per_rank)
        if self.microbatches is None:
            object.__setattr__(self, "microbatches", 2 * self.size)
        for name in ("microbatches", "stages_per_rank"):
            check_whole(f"PipelineParallel.{name}", getattr(self, name), 1)
        self._check_schedule()
        self._check_rest()

    def _check_rest(self) -> None:
        if isinstance(self.balance, list):
            object.__setattr__(self, "balance", tuple(self.balance))
        if self.balance not in ("time", "memory"):
            self._check_counts()
        if self.replay not in ("auto", "once", "twice"):
            raise ValueError(f"PipelineParallel.replay is {self.replay!r}; it must be 'auto', 'once' or 'twice'.")
        if self.split is None:
            return
        if not callable(self.split):
            raise ValueError(
                f"PipelineParallel.split is {self.split!r}; it must be a function (model, stage, stages) -> nn.Module."
            )
        if self.balance != "time":
            raise ValueError(
                f"PipelineParallel.balance is {self.balance!r} beside split=, which says itself what each stage gets. Leave "
                "one of them out."
            )

    def _take_file(self, table: ScheduleFile) -> None:
        """Stages and microbatches are the file's."""
        if len(table.ranks) != self.size:
            raise ValueError(
                f"pp is {self.size}, and {self.schedule!r} has {len(table.ranks)} lines, one for each rank."
            )
        most = max(len(table.of_rank(rank)) for rank in range(self.size))
        for name, value in (("microbatches", table.microbatches), ("stages_per_rank", most)):
            if getattr(self, name) not in (None, value):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, and the file {self.schedule!r} has {value}; leave it out."
                )
            object.__setattr__(self, name, value)
        object.__setattr__(self, "schedule", str(self.schedule))
        self._check_rest()

    @property
    def file(self) -> ScheduleFile | None:
        """The schedule's table, where it is one of a file."""
        return read_schedule(self.schedule) if is_schedule_file(self.schedule) else None

    @property
    def facts(self) -> Schedule:
        """What is known of the schedule."""
        if (table := self.file) is not None:
            return Schedule(str(self.schedule), None, splits_backward=table.splits_backward)
        return SCHEDULE_OBJECTS[self.schedule]

    def _check_schedule(self) -> None:
        """What torch's schedules ask for."""
        microbatches, per_rank, allowed = self.microbatches or 0, self.stages_per_rank or 0, self.facts.stages_per_rank
        if allowed and per_rank not in allowed:
            raise ValueError(
                f"stages_per_rank is {per_rank}, and {self.schedule!r} has {allowed[0]} on each rank. Leave it out, or use "
                "'interleaved_1f1b'."
            )
        if (problem := self.facts.check(self.size, microbatches)) is not None:
            raise ValueError(f"microbatches is {microbatches} for {self.schedule!r} on {self.size} ranks; {problem}")

    def _check_counts(self) -> None:
        counts = self.balance
        if not isinstance(counts, tuple) or not all(type(n) is int and n > 0 for n in counts) or not counts:
            raise ValueError(
                f"PipelineParallel.balance is {counts!r}; it must be 'time', 'memory' or how many layers each stage gets, "
                "such as [8, 8]."
            )
        if len(counts) != self.stages:
            raise ValueError(
                f"PipelineParallel.balance has {len(counts)} numbers and there are {self.stages} stages "
                f"({self.size} ranks x {self.stages_per_rank}); give one for each."
            )

    @property
    def stages(self) -> int:
        """Stages of one pipeline."""
        if (table := self.file) is not None:
            return table.stages
        return self.size * (self.stages_per_rank or 1)

    @classmethod
    def of(cls, pp: int | PipelineParallel) -> PipelineParallel:
        """What ``pp=`` means: a number of ranks, or the object."""
        return pp if isinstance(pp, PipelineParallel) else cls(pp)
