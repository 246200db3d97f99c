"""The question that `fit` answers: the job, the device, and the pins; checked before anything is traced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any

from nemo_like._util.words import check_bool, check_whole, check_word
from nemo_like.flags import FLAGS, PRECISION
from nemo_like.job import Job
from nemo_like.options import (
    CONTEXT_METHODS,
    FSDP2,
    LOSSES,
    SCHEDULES,
    CheckpointConfig,
    MemoryBudget,
    NamedLists,
    PipelineParallel,
    StepSpec,
    did_you_mean,
    parse_ac,
)
from nemo_like.options.flag import Flag
from nemo_like.options.parallel import check_imbalance, undivided
from nemo_like.options.step import SYNC
from nemo_like.planning.devices import Device, device_of
from nemo_like.planning.fit.layouts import MOVED, SHARDING
from nemo_like.planning.predictions.reserved import default_limit

MODES = ("none", "full", "selective", "plan")
# Names of pins that are whole numbers.
AXES = ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp", "stages_per_rank", "micro_batch", "grad_accum")
_WORDS: dict[str, Collection[str]] = {
    "ac": MODES,
    "loss": LOSSES,
    "offload": ("none", "boundary"),
    "schedule": SCHEDULES,
    "cp_method": CONTEXT_METHODS,
    "sync": SYNC,
}
_SWITCHES = ("sequence_parallel", "loss_parallel")
_OF_FSDP2 = tuple(flag.name for flag in SHARDING)
BESIDE = ("imbalance", "host_memory", "balance")  # Further keywords, of parts of a job.
PINS = (*AXES, *_WORDS, *_OF_FSDP2, *_SWITCHES)


@dataclass(frozen=True)
class Question:
    """One job on one kind of device."""

    # Fields that every configuration has: precision, loop, optimizer, device, allocator, CPU memory.
    job: Job
    gpus: int
    # Tokens of the sequences that bytes and seconds are predicted for: the longest, where they differ.
    seq_len: int
    limit: int  # Bytes that a step may take on each GPU.
    global_batch: int | None = None  # Sequences of a step over all GPUs.
    # Allowed values by name out of `PINS`; other names are free.
    pins: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # The caller's job, for the fields of its options that are not searched; None: nothing.
    asked: Job | None = None
    # True if `limit` is not the caller's, so that a job has less where a tenth is not enough outside of the
    # allocator.
    is_default_limit: bool = False

    def __post_init__(self) -> None:
        for name, least in (("gpus", 1), ("seq_len", 2), ("global_batch", 1), ("limit", 1)):
            if name != "global_batch" or self.global_batch is not None:
                check_whole(name, getattr(self, name), least)
        if self.job.step.microbatches != 1:
            raise ValueError(
                f"step has microbatches={self.job.step.microbatches}, which fit chooses itself; pin grad_accum instead."
            )
        if (imbalance := self.job.ep.imbalance) is not None:
            check_imbalance("imbalance", imbalance, max(self.pins["ep"]) if "ep" in self.pins else None)
        self._check_sizes()
        if True in self.pins.get(MOVED, ()):
            self.device.check_host_rates(MOVED)
            if self.gpus == 1:
                raise ValueError(
                    f"{MOVED} is FSDP2's, gpus is 1, and one rank keeps the model whole. Use more GPUs, or leave it out."
                )

    @cached_property
    def device(self) -> Device:
        """The device that is predicted for."""
        return device_of(self.job)

    def limit_of(self, job: Job) -> int:
        """Return the bytes that a step of `job` may take on each GPU."""
        return min(self.limit, default_limit(job, self.device)) if self.is_default_limit else self.limit

    def alike(self, other: Question) -> bool:
        """Return whether both differ in the compiler alone: a layout is reported for one of them."""
        ours, theirs = (question.job for question in (self, other))
        return (ours.precision, ours.step.optimizer) == (theirs.precision, theirs.step.optimizer)

    @property
    def host_memory(self) -> int:
        """Bytes of CPU memory that one rank has."""
        return int(self.job.search.host_memory)

    @property
    def between(self) -> str:
        """The mode that is searched between none and full checkpointing: lists of names, if they are pinned."""
        return next((word for word in self.pins.get("ac", ()) if word not in MODES), "selective")

    @property
    def shardings(self) -> list[FSDP2]:
        """Options of FSDP2 that are searched."""
        values = [dict.fromkeys(self.pins.get(flag.name, self._searched(flag))) for flag in SHARDING]
        return [FSDP2(**dict(zip(_OF_FSDP2, each, strict=True))) for each in itertools.product(*values)]

    def _searched(self, flag: Flag) -> tuple[Any, ...]:
        """Return the values of an option of FSDP2 that are tried where none is given; a CPU's CPU memory is its own."""
        stays = flag.moves and (self.device.kind == "cpu" or self.lacks_host_rates)
        return flag.searched[:1] if self.gpus == 1 or stays else flag.searched

    @property
    def lacks_host_rates(self) -> bool:
        """True if their state is left on the GPUs since the speed of an optimizer in CPU memory is not known."""
        return self.gpus > 1 and MOVED not in self.pins and not self.device.knows_host_rates

    def _check_sizes(self) -> None:
        """Refuse pins that contradict each other or the number of GPUs."""
        one = {name: self.pins[name][0] for name in AXES if len(self.pins.get(name, ())) == 1}
        axes = [name for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp") if name in one]
        product = math.prod(one[name] for name in axes)
        if message := undivided({name: one[name] for name in axes}, self.gpus, f"gpus={self.gpus}"):
            raise ValueError(message)
        if len(axes) == 5 and product != self.gpus:
            sizes = " x ".join(f"{name}={one[name]}" for name in axes)
            raise ValueError(f"{sizes} is {product}, and gpus={self.gpus}. Leave one of them out, or change gpus.")
        shares = [name for name in ("dp_replicate", "dp_shard", "micro_batch", "grad_accum") if name in one]
        sequences = math.prod(one[name] for name in shares)
        if self.global_batch is not None and self.global_batch % sequences:
            raise ValueError(
                f"global_batch is {self.global_batch}, which is not a multiple of "
                f"{' x '.join(f'{name} {one[name]}' for name in shares)} = {sequences}. Change one of them."
            )
        if "schedule" in self.pins and one.get("pp") == 1:
            raise ValueError(f"schedule is {self.pins['schedule'][0]!r} and pp is 1: one stage has none. Drop one.")


def read_question(job: Job | None, given: Mapping[str, Any]) -> tuple[list[Job], dict[str, tuple[Any, ...]], Job]:
    """Return the jobs to search for, one for each precision, optimizer and compiler, the values that are pinned, by name,
    and the job as it was requested.

    Args:
        job: a job whose given fields are pinned; None: a job of the keywords.
        given: keywords of `fit`, out of `PINS`, `Job.of`'s, ``imbalance``, ``balance`` and ``host_memory``.

    Raises:
        ValueError: an unknown name, or a value that the name cannot have.
        TypeError: a value of the wrong kind.
    """
    pins = {name: value for name, value in given.items() if name in PINS and not is_dataclass(value)}
    rest = {name: value for name, value in given.items() if name not in pins and value is not None}
    imbalance, host_memory, balance = (rest.pop(name, None) for name in BESIDE)
    chosen = {name: _several(name, rest.pop(name, None)) for name in ("precision", "optimizer", "compile")}
    if getattr(rest.get("tp"), "asynchronous", False):  # which Inductor alone does
        rest["compile"], chosen["compile"] = "inductor", ["inductor"]
    requested = Job.of(**{"gpu": FLAGS["gpu"].default, **rest}) if job is None else job.change(**rest) if rest else job
    if balance is not None and balance != requested.pp.balance:
        requested = replace(requested, pp=_balanced(requested.pp, balance, pins))
    read = read_pins({**_pinned_by(requested), **{name: value for name, value in pins.items() if value is not None}})
    fsdp = requested.strategy if isinstance(requested.strategy, FSDP2) else FSDP2()
    plain = Job.of(ac="none")
    base = replace(
        requested,
        **{name: getattr(plain, name) for name in _SEARCHED},
        world_size=None,
        strategy=replace(fsdp, **{flag.name: flag.searched[0] for flag in SHARDING}),
        cp=replace(requested.cp, size=1),
        tp=replace(requested.tp, size=1),
        ep=replace(requested.ep, size=1, imbalance=requested.ep.imbalance if imbalance is None else imbalance),
        search=requested.search if host_memory is None else replace(requested.search, host_memory=host_memory),
    )
    if device_of(base).kind == "cuda":
        # As everyone trains: in bfloat16, the optimizer's step in one kernel, compiled layers where these are faster.
        usual = {
            "precision": ("precision", [PRECISION]),
            "optimizer": ("step", ["adamw-fused"]),
            "compile": ("compile", ["none", "inductor"]),
        }
        for name, (field_of, values) in usual.items():
            if chosen[name] == [None] and field_of not in requested.asked:
                chosen[name] = values
    jobs = []
    for precision, optimizer, backend in itertools.product(*chosen.values()):
        changed: dict[str, Any] = {} if precision is None else {"precision": None if precision == "fp32" else precision}
        if optimizer is not None:
            changed["step"] = StepSpec.of(base.step, optimizer)
        if backend is not None:
            changed["compile"] = None if backend == "none" else backend
        jobs.append(replace(base, **changed))
    return jobs, read, requested


# Fields of a job that `fit` chooses; of the other axes and of FSDP2 it chooses a part.
_SEARCHED = ("ac", "loss", "offload", "dp_replicate", "pp", "planned_tokens")


def _balanced(pp: PipelineParallel, balance: Any, pins: Mapping[str, Any]) -> PipelineParallel:
    """Return `pp` with the layers of each stage; numbers of layers are those of one pinned pipeline."""
    if isinstance(balance, str):
        return replace(pp, balance=balance)
    sizes = {name: pins.get(name) for name in ("pp", "schedule", "stages_per_rank")}
    size, schedule, per_rank = (value[0] if isinstance(value, list | tuple) else value for value in sizes.values())
    if size is None and pp.size == 1:
        raise ValueError(f"balance is {balance!r}, and no pipeline is pinned whose stages these are. Pin pp, too.")
    return replace(
        pp,
        size=size or pp.size,
        schedule=schedule or pp.schedule,
        stages_per_rank=per_rank or pp.stages_per_rank,
        microbatches=None,
        balance=tuple(balance),
    )


def _several(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value]
    if not value:
        raise ValueError(f"{name} is {value!r}; give at least one, or leave it out.")
    return list(dict.fromkeys(value))


def _pinned_by(job: Job) -> dict[str, Any]:
    """Return the pins of the fields that the caller gave to `job`.

    Raises:
        ValueError: a field has a value that `fit` does not search.
    """
    fields, pins = job.asked, dict[str, Any]()
    tp, cp, pp = job.tp, job.cp, job.pp
    of_tp = {"sequence_parallel": tp.sequence_parallel, "loss_parallel": tp.loss_parallel}
    of_pp = {"schedule": pp.schedule, "grad_accum": pp.microbatches, "stages_per_rank": pp.stages_per_rank}
    every: dict[str, dict[str, Any]] = {
        "tp": {"tp": tp.size} | (of_tp if tp.size > 1 else {}),
        "cp": {"cp": cp.size, "cp_method": cp.method},
        "ep": {"ep": job.ep.size},
        "pp": {"pp": pp.size} | (of_pp if pp.size > 1 else {}),
        "dp_replicate": {"dp_replicate": job.dp_replicate},
        "loss": {"loss": "model" if job.loss is None else "chunked"},
        "offload": {"offload": job.offload.mode},
    }
    for name, values in every.items():
        pins |= values if name in fields else {}
    if "strategy" in fields:
        if not isinstance(job.strategy, FSDP2):
            raise ValueError(
                f"strategy is {type(job.strategy).__name__.lower()!r}, and fit searches FSDP2 alone. Leave strategy out, or "
                "use 'fsdp2'."
            )
        for flag in SHARDING:
            if (value := getattr(job.strategy, flag.name)) != flag.searched[0]:
                pins[flag.name] = value
    if "ac" in fields:
        pins["ac"] = "plan" if isinstance(job.ac, MemoryBudget) else getattr(job.ac, "mode", "a plan")
        if isinstance(job.ac, CheckpointConfig) and job.ac != parse_ac(job.ac.mode):
            raise ValueError(
                f"ac is {job.ac}, and fit counts the modes {', '.join(MODES)} with their defaults alone. Give the mode."
            )
    if "step" in fields and set(job.step.changed) != {"optimizer"}:
        pins["sync"] = job.step.sync
    if job.step.in_backward:
        pins |= dict.fromkeys(("grad_accum", "pp", "cp", "ep"), 1) | {MOVED: False}
    return pins


def read_pins(pins: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the caller's pins as allowed values: one value means that one, a list any of its members, None nothing.

    Raises:
        ValueError: an unknown name, or a value that the name cannot have.
        TypeError: a value of the wrong kind.
    """
    read: dict[str, tuple[Any, ...]] = {}
    for name, value in pins.items():
        if name not in PINS:
            raise ValueError(f"{name!r} can't be pinned; these can: {', '.join(PINS)}." + did_you_mean(name, PINS))
        if value is None:
            continue
        several = isinstance(value, Collection) and not isinstance(value, str)
        values = tuple(value) if several else (value,)
        if not values:
            raise ValueError(f"{name} is {value!r}; give at least one value, or leave it out.")
        read[name] = tuple(_read(name, one) for one in values)
    every = (parse_ac(mode) for mode in read.get("ac", ()) if mode not in MODES)
    lists = [lists for lists in every if isinstance(lists, NamedLists) and not lists.whole]
    if lists and set(read.setdefault("offload", ("none",))) != {"none"}:
        raise ValueError(
            f"ac is {lists[0]} and offload is {', '.join(read['offload'])}: copies of the inputs of regions inside of a "
            "layer are not predicted. Leave offload out, or recompute whole layers."
        )
    return read


def _read(name: str, value: Any) -> Any:
    words = "a whole number" if name in AXES else f"one of {', '.join(_WORDS.get(name, ()))}"
    if (name in AXES and type(value) is not int) or (name in _WORDS and not isinstance(value, str)):
        raise TypeError(f"{name} is {value!r}; it must be {words}.")
    if name in AXES:
        check_whole(name, value, 1)
        return value
    if name in _OF_FSDP2:
        return getattr(FSDP2(**{name: value}), name)  # which checks it
    if name in _SWITCHES:
        check_bool(name, value)
        return value
    if name == "ac" and value.strip()[:1] in ("{", "["):
        return _lists(value)
    return check_word(name, value, _WORDS[name])


def _lists(text: str) -> str:
    """Return lists of names in the one spelling that they have as a word.

    Raises:
        ValueError: they are none.
    """
    lists = parse_ac(text)
    if not isinstance(lists, NamedLists):
        raise ValueError(f"ac is {text!r}; fit counts lists of names, and no budget next to them.")
    return lists.mode
