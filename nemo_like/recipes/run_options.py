"""Options of every training job, once: name, default, meaning. Command line and YAML file are made from it
(`nemo_like.recipes.job_options`)."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from nemo_like._util.console import check_writable, flag
from nemo_like.flags import FLAGS, check_flag, job_of
from nemo_like.options import MemoryBudget, did_you_mean, normalise, parse_ac, parse_bytes, parse_dtype
from nemo_like.options.parallel import BACKENDS

if TYPE_CHECKING:  # the help of a job needs no torch
    from torch import nn

    from nemo_like.job import Job

SCHEDULES = ("cosine", "linear", "constant")

RESUME = ("no", "must", "auto")
DEVICES = ("auto", *reversed(BACKENDS))
SEARCHED = ("dp_replicate", "grad_accum", "ac", "loss", "offload", "reshard_after_forward", "cpu_offload")
"""Options that ``--fit`` can choose in every job."""


def option(default: object, help: str, kind: Callable[[str], Any] = str, **argument: object) -> Any:
    """A field of an options class that is a command-line option, too; `argument`: more for argparse."""
    return dataclasses.field(default=default, metadata={"help": help, "kind": kind, "argument": argument})


def job_option(name: str, default: object = None, **argument: object) -> Any:
    """An `option` that is a field of the job: what `FLAGS` has for it; `default`: another one than there."""
    flag = FLAGS[name]
    return option(flag.default if default is None else default, flag.help.replace("%%", "%"), flag.kind, **argument)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that training jobs share. Each field is a command-line option of the same name, ``_`` written as ``-``.

    Raises:
        ValueError: a value is wrong; the message has the option, the value, the reason and what is accepted.
    """

    strategy: str = job_option("strategy")
    ac: str = job_option("ac")
    scope: str = job_option("scope")
    loss: str = job_option("loss")
    compile: str = job_option("compile")
    precision: str = job_option("precision", alias="--dtype")
    device: str = option("auto", f"{' | '.join(DEVICES)}; auto is cuda where there is one")
    offload: str = job_option("offload")
    cpu_offload: bool = job_option("cpu_offload", action=argparse.BooleanOptionalAction)  # without it --fit chooses
    reshard_after_forward: str = job_option("reshard_after_forward")
    fit: str = option(
        "no",
        "at the start, choose the fastest configuration that fits this device, by prediction, under --batch-size: all that "
        "is not given; or --fit=NAMES (with commas): these options",
        nargs="?",
        const="all",
    )
    fit_memory: str | None = option(None, "bytes of each device that --fit may use (default: all but a tenth)")
    fit_host_memory: str | None = option(
        None, "bytes of host memory that --fit may use for each rank (default: an equal share of all but a tenth)"
    )
    dp_replicate: int = job_option("dp_replicate")
    seq_len: int = option(256, "tokens per sample", int)
    batch_size: int = option(8, "samples per step over all ranks and micro-batches", int)
    grad_accum: int = job_option("grad_accum")
    steps: int = option(200, "steps of the whole run, those before a resume included", int)
    lr: float = option(3e-3, "peak learning rate of AdamW", float)
    schedule: str = option("cosine", f"learning rate after the warm-up: {' | '.join(SCHEDULES)}")
    warmup_steps: int | None = option(None, "steps of linear warm-up (default: 20, or all of fewer --steps)", int)
    lr_floor: float = option(0.1, "learning rate at the last step, as a share of the peak", float)
    weight_decay: float = option(0.1, "AdamW's weight decay, on parameters with two dims or more", float)
    beta1: float = option(0.9, "AdamW's first decay rate", float)
    beta2: float = option(0.95, "AdamW's second decay rate", float)
    clip: float = option(1.0, "clip the gradient to this norm; 0 clips nothing", float)
    seed: int = option(0, "seed of weights, data order and dropout", int)
    eval_every: int = option(50, "steps between evaluations on held-out samples; 0: only after the last step", int)
    eval_samples: int = option(64, "held-out samples per evaluation; 0 evaluates nothing", int)
    log_every: int = option(10, "steps between reports of the loss", int)
    json: str | None = option(None, "write a summary of the run to this file")
    checkpoint_dir: str | None = option(None, "folder for checkpoints, on storage that all hosts share")
    save_every: int = option(100, "steps between checkpoints (with --checkpoint-dir); the last step has one too", int)
    keep: int = option(2, "complete checkpoints to keep; older ones are deleted", int)
    resume: str = option(
        "no",
        "go on from the last complete checkpoint: --resume needs one, --resume=auto starts anew where there is none",
        nargs="?",
        const="must",
    )
    sync_save: bool = option(False, "write checkpoints before training goes on, rather than during training", bool)
    plain: bool = option(False, "print lines instead of a progress bar", bool)

    @property
    def choices(self) -> Mapping[str, Sequence[str]]:
        """The words that an option may be, by its name."""
        of_job = {name: FLAGS[name].choices for name in self.of_job if FLAGS[name].choices}
        return {**of_job, "device": DEVICES, "schedule": SCHEDULES, "resume": RESUME}

    @property
    def of_job(self) -> tuple[str, ...]:
        """The options that are the job's, by name."""
        return tuple(name for name in FLAGS if hasattr(self, name) and name != "schedule")

    @property
    def least(self) -> Mapping[str, float]:
        """The smallest number that an option may be, by its name."""
        at_least_1 = ("seq_len", "batch_size", "steps", "log_every", "save_every", "keep")
        at_least_0 = ("warmup_steps", "eval_every", "eval_samples", "seed", "lr", "lr_floor", "weight_decay")
        return dict.fromkeys(at_least_1, 1) | dict.fromkeys((*at_least_0, "beta1", "beta2", "clip"), 0)

    def __post_init__(self) -> None:
        for name, known in self.choices.items():
            self._normalise_choice(name, known)
        for name, least in self.least.items():
            value = getattr(self, name)
            if value is None and name == "warmup_steps":
                continue
            if isinstance(value, bool) or not math.isfinite(value) or value < least:
                raise ValueError(f"{flag(name)} is {value!r}; it must be a finite number >= {least}.")
        for name in self.of_job:
            check_flag(name, getattr(self, name))
        for name, limit in (("beta1", 1.0), ("beta2", 1.0)):
            if getattr(self, name) >= limit:
                raise ValueError(f"{flag(name)} is {getattr(self, name)!r}; it must be less than {limit}.")
        if self.lr_floor > 1:
            raise ValueError(
                f"--lr-floor is {self.lr_floor!r}; it is a share of the peak rate, and must be from 0 to 1."
            )
        if self.steps and self.warmup > self.steps:
            raise ValueError(
                f"--warmup-steps is {self.warmup_steps}, and the run has {self.steps} steps: it would end before the "
                "warm-up does. Give fewer, or more --steps."
            )
        if self.batch_size % self.grad_accum:
            raise ValueError(
                f"--grad-accum is {self.grad_accum}, which does not divide --batch-size {self.batch_size}; "
                "a step's micro-batches must be of equal size."
            )
        if self.resume != "no" and self.checkpoint_dir is None:
            raise ValueError("--resume needs --checkpoint-dir: the folder that an earlier run wrote to.")
        self._check_precision()
        try:
            parse_ac(self.ac)
        except ValueError as error:
            raise ValueError(f"--ac: {error}") from error
        self._check_fit()
        self._check_unread()
        check_writable("--json", self.json)

    def _check_fit(self) -> None:
        unknown = [name for name in self.free if name not in self.searched]
        if unknown:
            raise ValueError(
                f"--fit is {self.fit!r}, and {unknown[0]!r} is nothing that it chooses; that is all, or some of "
                f"{', '.join(self.searched)}." + did_you_mean(unknown[0], self.searched)
            )
        if not self.free:
            return
        for name, only in (("strategy", "fsdp2"), ("scope", "all")):
            if getattr(self, name) != only:
                raise ValueError(
                    f"{flag(name)} is {getattr(self, name)!r}, with which --fit predicts nothing. Leave one of the two out."
                )
        for name in ("fit_memory", "fit_host_memory"):
            if (size := getattr(self, name)) is not None:
                parse_bytes(size, flag(name))
        budget = parse_ac(self.ac)
        if "ac" not in self.free and (
            budget.fraction is not None
            if isinstance(budget, MemoryBudget)
            else normalise(self.ac) not in ("none", "full", "selective")
        ):
            raise ValueError(
                f"--ac is {self.ac!r}, with which --fit predicts nothing: it knows none, full, selective and budgets in "
                "bytes. Leave --ac to it, or leave --fit out."
            )

    @property
    def read_beside(self) -> Iterable[tuple[bool, str, tuple[str, ...]]]:
        """Options that are read only with others: whether they are now, what it takes, and their names."""
        return (
            (bool(self.free), "--fit", ("fit_memory", "fit_host_memory")),
            (self.checkpoint_dir is not None, "--checkpoint-dir", ("save_every", "keep", "sync_save")),
            (self.schedule != "constant", "another --schedule", ("lr_floor",)),
            (self.strategy == "fsdp2", "--strategy fsdp2", ("cpu_offload", "reshard_after_forward")),
        )

    def _check_unread(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for read, beside, names in self.read_beside:
            for name in names:
                if not read and getattr(self, name) != defaults[name]:
                    raise ValueError(
                        f"{flag(name)} is {getattr(self, name)!r}, and without {beside} nothing reads it. Add that, or "
                        f"leave {flag(name)} out."
                    )

    def _check_precision(self) -> None:
        import torch

        if parse_dtype("--precision", self.precision) is torch.float16:
            raise ValueError(
                f"--precision is {self.precision!r}: its small range needs the loss to be scaled, which this job does not "
                "do. Use bfloat16."
            )

    @property
    def searched(self) -> tuple[str, ...]:
        """Options that ``--fit`` can choose."""
        return SEARCHED

    @property
    def free(self) -> tuple[str, ...]:
        """Options that ``--fit`` chooses; empty where it was not asked for."""
        if self.fit in ("no", "all"):
            return self.searched if self.fit == "all" else ()
        return tuple(word.strip().replace("-", "_") for word in self.fit.split(",") if word.strip())

    def job(self, **fields: object) -> Job:
        """The job that `parallelize`, the planner and the search are asked; `fields`: more of it."""
        from nemo_like.recipes.loss import planned_loss

        job = job_of(
            {**{name: getattr(self, name) for name in self.of_job}, "sync": "last", "drop_output": True}, **fields
        )
        return replace(job, step=replace(job.step, loss_fn=planned_loss if self.loss == "model" else None))

    def check_model_loss(self, model: nn.Module, loss: str) -> None:
        """Raise ValueError where this job cannot train `model` with that ``--loss``."""
        if loss == "chunked":
            from nemo_like.recipes.loss import check_own_loss

            check_own_loss(model)

    def planned_input(self, rows: int, width: int) -> Any:
        """The shapes of a micro-batch of so many rows of so many tokens, as the model is called with it."""
        import torch

        ids = torch.zeros(rows, width, dtype=torch.int64)
        return ids if self.loss == "model" else {"input_ids": ids, "labels": ids, "shift_labels": ids}

    @staticmethod
    def packed_input(inputs: Any, rows: int, width: int) -> dict[str, Any]:
        """`planned_input` for rows of two documents each: the mask that keeps them apart is stored as well."""
        import torch

        positions = (torch.arange(width) % -(-width // 2)).expand(rows, width).contiguous()
        return ({"input_ids": inputs} if isinstance(inputs, torch.Tensor) else inputs) | {"position_ids": positions}

    usual_warmup: ClassVar[int] = 20
    """Steps of warm-up where it is not set."""

    @property
    def warmup(self) -> int:
        """Steps of warm-up."""
        return min(self.usual_warmup, self.steps) if self.warmup_steps is None else self.warmup_steps

    @property
    def passes(self) -> int:
        """Return how often a rank runs forward and backward in a step."""
        return self.grad_accum

    def rows(self, data_ranks: int) -> int:
        """Samples of one forward of a rank, where so many ranks read different ones."""
        return self.batch_size // (self.passes * data_ranks)

    @property
    def compute(self) -> str:
        """The dtype to compute in, but for matmuls in float8."""
        return self.precision

    @property
    def trains_less(self) -> Mapping[str, dict[str, Any]]:
        """Options that leave weights as they are, where the job has any: by what to write on the command line."""
        return {}

    @property
    def axes(self) -> Mapping[str, int]:
        """Ranks that read the same samples, by the option that sets it; their product must divide the ranks."""
        return {}

    def as_said(self) -> dict[str, Any]:
        """Every option by name, with None where the value follows from others."""
        return dataclasses.asdict(self)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Options without which a checkpoint's weights or place in the data would mean nothing: a resumed run has them."""
        return ("seq_len", "batch_size", "seed", "pack")

    @property
    def elsewhere(self) -> str:
        """The option that gives a run other checkpoints."""
        return "--checkpoint-dir"

    def _normalise_choice(self, name: str, known: Sequence[str]) -> None:
        value = getattr(self, name)
        word = normalise(value) if isinstance(value, str) else value
        if word not in known:
            raise ValueError(
                f"{flag(name)} is {value!r}; it must be one of {', '.join(known)}." + did_you_mean(str(word), known)
            )
        object.__setattr__(self, name, word)


# The learning rate as a pure function of the step, so that no schedule state has to be saved.


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up from 0 to `peak`, then down to ``floor * peak`` by the last step.

    >>> schedule = LearningRate("linear", peak=1.0, warmup=2, steps=4, floor=0.5)
    >>> [schedule.at(step) for step in range(4)]
    [0.5, 1.0, 0.75, 0.5]
    """

    kind: str
    """``cosine`` (half a period) | ``linear`` | ``constant`` (stays at `peak`)."""
    peak: float
    """Learning rate at the end of the warm-up."""
    warmup: int
    """Steps of warm-up; the first of them already moves the weights."""
    steps: int
    """Steps of the whole run."""
    floor: float = 0.1
    """Rate at the last step, as a share of `peak`."""

    def at(self, step: int) -> float:
        """The learning rate of the step numbered `step`, from 0; steps past the last one stay at the floor."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup + 1) / max(1, self.steps - self.warmup))
        shape = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.peak * (self.floor + (1 - self.floor) * shape)
