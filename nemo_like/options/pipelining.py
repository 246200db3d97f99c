"""Options to cut a model into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from nemo_like._util.words import check_fields, did_you_mean, normalise, setting
from nemo_like.options.flag import flagged

# The words of `PipelineParallel.loss_mean` and `ContextParallel.loss_mean`.


class Axis:
    """Options of an axis of ranks, for which their number is short."""

    @classmethod
    def of(cls, ranks: int | Self) -> Self:
        """Return the options for a number of `ranks`, or the object itself."""
        return ranks if isinstance(ranks, cls) else cls(size=ranks)  # type: ignore[call-arg]


LOSS_MEANS = ("tokens", "rows", "sum")
LossMean = str | Callable[[dict[str, Any]], Any] | None  # The type of both.


def parse_loss_mean(owner: str, loss_mean: LossMean, part: str) -> LossMean:
    """Return the ``loss_mean=`` of the options `owner`, a word in lower case; raise ValueError where it is none.

    part: a function of it is accepted, in words.
    """
    over = normalise(loss_mean) if isinstance(loss_mean, str) else loss_mean
    if over is None or callable(over) or over in LOSS_MEANS:
        return over
    raise ValueError(
        f"{owner}.loss_mean is {over!r}; it must be {', '.join(map(repr, LOSS_MEANS))} or a function of {part} that returns "
        "how much counts in it." + did_you_mean(str(over), LOSS_MEANS)
    )


# The schedules of a pipeline: one object each, with all that is read of one. To add a schedule, add an object.


def _equal_rounds(ranks: int, microbatches: int) -> str | None:
    rounds = max(1, microbatches // ranks)
    problem = f"it goes {rounds} rounds of equal length: use {rounds * ranks} or {(rounds + 1) * ranks}."
    return problem if microbatches % rounds else None


def _one_for_each_rank(ranks: int, microbatches: int) -> str | None:
    problem = f"with fewer micro-batches than stages, stages are idle all along: use at least {ranks}, or a smaller pp."
    return problem if microbatches < ranks else None


def _interleaved(ranks: int, microbatches: int, per_rank: int) -> float:
    return min(per_rank * microbatches, (per_rank + 1) * ranks - 1) / per_rank


@dataclass(frozen=True)
class Schedule:
    """Facts about a schedule of `torch.distributed.pipelining`."""

    name: str
    torch_class: str
    """Its class in `torch.distributed.pipelining`."""
    stages_per_rank: tuple[int, ...] = ()
    """Numbers of stages that a rank may hold, the default first; empty: any number, two by default."""
    v_shaped: bool = False
    """Two stages on a rank, the second half in the opposite order: the first and the last stage share a rank."""
    splits_backward: bool = False
    """Gradients of inputs (dI) first, of weights (dW) later."""
    check: Callable[[int, int], str | None] = lambda ranks, microbatches: None
    """(ranks, micro-batches): why it cannot run so many, and the way out; None: it can."""
    in_flight: Callable[[int, int, int], float] = lambda ranks, microbatches, per_rank: min(microbatches, ranks)
    """(ranks, micro-batches, stages per rank): with about so many micro-batches the first rank has gone forward and not
    back, in shares of its layers."""
    repeats_after: Callable[[int], int] | None = None
    """(this rank and those after it): the micro-batch from which on the rank's memory repeats itself; None: not known."""
    frees_sent: bool = False
    """The output of a stage is freed when it was sent; else when the step ends."""
    is_searched: bool = False
    """`nemo_like.planning.fit` looks at it where no schedule is pinned."""

    @property
    def default_per_rank(self) -> int:
        """Stages on a rank where it is not set."""
        return (*self.stages_per_rank, 2)[0]

    @property
    def several(self) -> bool:
        """Return whether a rank holds more than one stage."""
        return self.stages_per_rank != (1,)


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", "ScheduleGPipe", (1,), in_flight=lambda ranks, microbatches, per_rank: microbatches),
        Schedule(
            "1f1b",
            "Schedule1F1B",
            (1,),
            check=_one_for_each_rank,
            frees_sent=True,
            is_searched=True,
            repeats_after=lambda ranks: 2 * ranks + 2,
        ),
        Schedule(
            "interleaved_1f1b",
            "ScheduleInterleaved1F1B",
            check=_equal_rounds,
            in_flight=_interleaved,
            is_searched=True,
        ),
        Schedule(
            "interleaved_zero_bubble",
            "ScheduleInterleavedZeroBubble",
            check=_equal_rounds,
            in_flight=_interleaved,
            splits_backward=True,
        ),
        Schedule("zbv", "ScheduleZBVZeroBubble", (2,), v_shaped=True, splits_backward=True, is_searched=True),
        Schedule(
            "dualpipev",
            "ScheduleDualPipeV",
            (2,),
            v_shaped=True,
            splits_backward=True,
            check=lambda ranks, microbatches: (
                f"it takes at least as many as there are stages: use {2 * ranks}." if microbatches < 2 * ranks else None
            ),
        ),
    )
}


# Into which stages a model is cut.


def read_balance(value: Any) -> str | tuple[int, ...]:
    """Return the balance that ``--balance`` means.

    Raises:
        ValueError: neither a word nor numbers of layers.
    """
    if value in ("time", "memory"):
        return str(value)
    try:
        return tuple(int(word) for word in value.split(","))
    except ValueError:
        raise ValueError(
            f"--balance is {value!r}; it must be time, memory, or how many layers each stage gets, such as 8,8."
        ) from None


@dataclass(frozen=True)
class PipelineParallel(Axis):
    """Deal a model's layers out to `size` ranks. ``pp=2`` means the defaults.

    >>> PipelineParallel(4, schedule="interleaved-1f1b", microbatches=8).stages
    8
    """

    size: int = flagged(
        1, "plan pins pretrain", name="pp", kind=int, least=1, unit="whole number of ranks", called="pp"
    )
    """Ranks of one pipeline; must divide the number of ranks."""
    schedule: str = flagged("1f1b", "plan pins pretrain", name="pp_schedule", choices=SCHEDULES)
    """The order of the micro-batches. ``gpipe`` | ``1f1b`` | ``interleaved_1f1b`` | ``interleaved_zero_bubble`` |
    ``zbv`` | ``dualpipev``: torch's."""
    microbatches: int | None = setting(None, least=1)
    """Into how many parts `Pipeline.step` cuts a batch. None: twice the number of ranks."""
    stages_per_rank: int | None = flagged(None, "plan pins pretrain", kind=int, least=1)
    """Stages on one rank. None: 1 for ``gpipe`` and ``1f1b``, else 2; the V-shaped schedules take 2 alone."""
    balance: str | tuple[int, ...] = flagged("time", values="time | memory | counts such as 8,8,7,7", read=read_balance)
    """The layers of a stage. ``"time"``: the stage with the most FLOPs has as few as possible, the head counted;
    ``"memory"``: the rank that peaks highest peaks as low as it can; or how many layers each stage gets, from the
    first stage on."""
    loss_mean: str | Callable[[Any], Any] | None = None
    """The numbers that the loss of a batch is a mean over; so many each micro-batch has. ``"tokens"``: labels that are
    not -100, or a sum where the batch has ``num_items_in_batch``; ``"rows"``: rows or elements; ``"sum"``: it is a sum; or
    a function of a micro-batch, a dict of tensors, that returns how much counts in it. None: ``"tokens"`` for a model of
    transformers; any other model needs one of these. The first step compares it
    with one call of two micro-batches; so does the first step whose micro-batches count differently."""
    split: Callable[[Any, int, int], Any] | None = None
    """For a model that its list of layers does not cut: ``split(model, stage, stages)`` returns the module of one stage. It
    gets a copy of the model's modules with the model's own parameters, which it may take apart; parameters keep the names
    that they have in `model`. A stage's forward is called with the output of the stage before it (a floating-point
    tensor, or a tuple of them), as positions, and with the entries of a micro-batch that it names; the last stage's
    returns the loss."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stages_per_rank is None:
            object.__setattr__(self, "stages_per_rank", self.facts.default_per_rank)
        if self.microbatches is None:
            object.__setattr__(self, "microbatches", 2 * self.size)
        self._check_schedule()
        self._check_rest()

    def _check_rest(self) -> None:
        if isinstance(self.balance, list):
            object.__setattr__(self, "balance", tuple(self.balance))
        if self.balance not in ("time", "memory"):
            self._check_counts()
        object.__setattr__(self, "loss_mean", parse_loss_mean("PipelineParallel", self.loss_mean, "a micro-batch"))
        if self.split is None:
            return
        if not callable(self.split):
            raise ValueError(
                f"PipelineParallel.split is {self.split!r}; it must be a function (model, stage, stages) -> nn.Module."
            )
        if self.balance != "time":
            raise ValueError(
                f"PipelineParallel.balance is {self.balance!r} with split=, which itself defines each stage. "
                "Leave one of them out."
            )

    @property
    def facts(self) -> Schedule:
        """Return the facts about the schedule."""
        return SCHEDULES[self.schedule]

    def _check_schedule(self) -> None:
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
        return self.size * (self.stages_per_rank or 1)
