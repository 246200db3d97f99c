"""The job of a `transformers.Trainer`, or of one of TRL's: its options as a `Job`, its largest batch, its plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from nemo_like._util.log import say_once
from nemo_like._util.rng import random_numbers_put_back
from nemo_like._util.words import parse_dtype, write_bytes
from nemo_like.distributed.launch import world_size
from nemo_like.fake.model_copy import copy_to_keep
from nemo_like.integrations.accelerate_settings import AccelerateSettings, accelerate_settings
from nemo_like.integrations.trainer_batches import largest_batch
from nemo_like.job import Job
from nemo_like.options import DDP, CheckpointConfig, ContextParallel, MemoryBudget, Precision, Single, StepSpec
from nemo_like.options.optimizers import TRAINER_OPTIMIZERS
from nemo_like.planning.devices import Device, device_of, step_limit
from nemo_like.planning.model.traced import MODES
from nemo_like.planning.predict import predict
from nemo_like.planning.predictions.reserved import default_limit
from nemo_like.planning.report import SHARES, PlanReport, ReportRow
from nemo_like.precision import Autocast
from nemo_like.settings.paste import trainer_call
from nemo_like.transformers_compat import prepared_inputs

# Fields of training arguments by which transformers checkpoints every layer itself, in the order in which it reads them.
_CHECKPOINTS = ("activation_checkpointing", "gradient_checkpointing")
# Names of `TrainingArguments.optim` that are planned by another one.
_OPTIMIZERS = TRAINER_OPTIMIZERS | {"paged_adamw_8bit": "adamw-8bit"}
# The key of Liger's configuration for head and loss in one kernel, which it has if it is not told otherwise
# (``_apply_liger_kernel_to_instance``).
_LIGER_LOSS = "fused_linear_cross_entropy"


def job_of_trainer(trainer: Any, **asked: Any) -> Job:
    """Return the job that a trainer runs: by its settings, those of accelerate, and `asked`.

    Args:
        trainer: as its constructor leaves it.
        asked: keywords of `Job.of`: ``ac``, ``loss``, ``cp``, ``offload``.

    Raises:
        NotImplementedError: DeepSpeed, FSDP1 or another way to shard, and ``cp`` without FSDP2: no plan is made of these.
    """
    args, told = trainer.args, accelerate_settings()
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer not in _OPTIMIZERS:
        say_once(f"A plan has no optim={optimizer!r}: planned with torch's AdamW, whose state is as large or larger.")
    passes, ranks = args.gradient_accumulation_steps, world_size()
    if asked.get("ac") in (None, "none") and own_checkpointing(args) is not None:
        asked["ac"] = "full"
    if getattr(args, "use_liger_kernel", False) and (args.liger_kernel_config or {}).get(_LIGER_LOSS, True):
        asked["loss"] = "chunked"  # Liger's loss never makes the logits of all tokens, either.
    step = StepSpec(
        microbatches=passes,
        sync="last" if passes > 1 else "every",
        keeps_output=False,  # compute_loss returns the loss only
        optimizer=_OPTIMIZERS.get(optimizer, "adamw"),
    )
    dtype = told.precision
    return Job.of(
        strategy=_strategy(told, ranks, ContextParallel.of(asked.get("cp") or 1).size),
        world_size=ranks,
        step=step,
        precision=Precision(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype) if told.shards else dtype,
        **asked,
    )


def own_checkpointing(args: object) -> tuple[str, str] | None:
    """Return the setting by which a trainer checkpoints every layer itself, and the way to drop it; None: there is none.

    Args:
        args: training arguments of any transformers 5 (older names of the settings are read too).
    """
    for name in _CHECKPOINTS:
        if getattr(args, name, False):
            return f"{name}=True in the training arguments", f"Set {name}=False"
    if (getattr(args, "fsdp_config", None) or {}).get("activation_checkpointing", False):
        return "fsdp_config['activation_checkpointing']", "Remove it from fsdp_config"
    if accelerate_settings().checkpoints:
        return "accelerate's config (fsdp_activation_checkpointing: true)", "Set it to false"
    return None


def _strategy(told: AccelerateSettings, ranks: int, cp: int) -> Any:
    if told.other_sharding:
        raise NotImplementedError(f"{told.other_sharding} shards this job, and a plan knows FSDP2 alone.")
    if told.shards:
        return told.shards
    if cp > 1:
        raise NotImplementedError(
            f"cp={cp} without FSDP2 leaves whole weights on each GPU, of which no plan is made. Shard by accelerate's FSDP2 "
            "(fsdp_version: 2), or use a mode such as ac='selective'."
        )
    return Single() if ranks == 1 else DDP()


def copy_for_plans(model: nn.Module) -> nn.Module | None:
    """Return `planned_model`; None, which is logged: the model has something that cannot be copied."""
    try:
        return planned_model(model)
    except (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError) as error:
        say_once(f"{type(model).__name__} cannot be copied ({error}): no plan is made of this job.")
        return None


def planned_model(model: nn.Module) -> nn.Module:
    """Return a copy of a trainer's model on the meta device, called and cast as accelerate will do it.

    Take it before anything checkpoints or shards the model.
    """
    copied, told = copy_to_keep(model), accelerate_settings()
    if not told.shards:
        return copied
    if told.precision is not None:
        for parameter in copied.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()  # accelerate: optimizers work on float32
        Autocast(copied, "cpu", parse_dtype("precision", told.precision), None).put()
    return copied


def reference_bytes(trainer: Any) -> int:
    """Return the bytes of a reference model that a trainer keeps on this rank (TRL's DPO), which no plan has."""
    reference = getattr(trainer, "ref_model", None)
    if not isinstance(reference, nn.Module):
        return 0
    return sum(p.nbytes for p in reference.parameters()) // (world_size() if accelerate_settings().shards else 1)


def without_reference(trainer: Any, budget: MemoryBudget, device: Device) -> MemoryBudget:
    """Return the part of a budget that is left to the model that trains.

    Raises:
        ValueError: the reference model takes all of it.
    """
    taken = reference_bytes(trainer)
    if not taken or budget.fraction is not None:
        return budget
    size = budget.peak_bytes or int(device.memory_bytes * (budget.device_share or 0.0))
    if size <= taken:
        raise ValueError(
            f"ac={str(budget)!r}: the reference model alone takes {write_bytes(taken)}. Give a larger budget."
        )
    return MemoryBudget(peak_bytes=size - taken)


class _ModelCalledError(Exception):
    """Ends a step where it calls the model."""


def call_of_model(trainer: Any, batch: Any) -> dict[str, Any]:
    """Return the keywords that a trainer calls its model with for a batch. The model does not run."""
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"A plan needs the model's arguments, and a batch of {type(trainer).__name__} is a "
            f"{type(batch).__name__}, of which it makes them later. Pass ac_sample_input= to the trainer."
        )
    seen, model = dict[str, Any](), trainer.model

    def stop(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen.update(kwargs)
        raise _ModelCalledError

    was_training = model.training
    try:
        with random_numbers_put_back(), model.register_forward_pre_hook(stop, prepend=True, with_kwargs=True):
            model.train()
            trainer.compute_loss(model, prepared_inputs(trainer, batch), num_items_in_batch=None)
    except _ModelCalledError:
        return seen
    finally:
        model.train(was_training)
    raise ValueError(f"{type(trainer).__name__} does not call its model for a batch. Pass ac_sample_input=.")


def plan_trainer(trainer: Any, *, memory: int | str | None = None, what_if: bool = True) -> PlanReport:
    """Return the plan of a trainer's job: whether its step fits, the fastest ``ac`` that does, and its cost.

    The step has the largest batch that the trainer's data and collator can make. Runs nothing on a GPU.

    Args:
        trainer: a `transformers.Trainer` or one of TRL's, before ``train()``, with `CheckpointingMixin` or without.
        memory: as for `nemo_like.predict`.
        what_if: also report the effects of single changes.

    Raises:
        ValueError, NotImplementedError: as `nemo_like.predict`; a training set that is a stream; sharding by others.

    >>> print(plan_trainer(trainer).verdict())  # doctest: +SKIP
    """
    planned = getattr(trainer, "planned_job", None)
    model, job = (planned_model(trainer.model), job_of_trainer(trainer)) if planned is None else planned()
    sample = call_of_model(trainer, largest_batch(trainer))
    if taken := reference_bytes(trainer):
        device = device_of(job)
        memory = (default_limit(job, device) if memory is None else step_limit(device, memory)) - taken
        say_once(f"The reference model's {write_bytes(taken)} are not in the plan: its limit is lower by them.")
    set_up = ac_word(job.ac)
    rows = [] if set_up in ("", *MODES) else [*SHARES, set_up]
    report = predict(model, job, sample_input=sample, rows=rows, memory=memory, what_if=what_if)
    args = trainer.args
    sizes = {"batch_size": args.per_device_train_batch_size, "seq_len": getattr(args, "max_length", None)}
    return as_set_up(trainer, TrainerReport(**vars(report), sizes=sizes), set_up)


def ac_word(ac: object) -> str:
    """Return a mode or a budget as a report's rows have it; empty: it has no such row."""
    word = ac.mode if isinstance(ac, CheckpointConfig) else ac.words if isinstance(ac, MemoryBudget) else None
    return word if isinstance(word, str) and word != "sequential" else ""


@dataclass(frozen=True)
class TrainerReport(PlanReport):
    """The report of a trainer's job: its line to paste is the trainer's arguments."""

    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Rows of a micro-batch on one rank, and the longest row where the trainer cuts rows, by our flags."""

    def call(self, row: ReportRow | None = None, sample: str | None = None) -> str:
        """Return the arguments that run `row` (default: `best`); a trainer needs no `sample`.

        Raises:
            ValueError: nothing fits, and no row was given.
        """
        row = self.best if row is None else row
        if row is None:
            raise ValueError(self.verdict())
        return trainer_call(self.job, ac=row.ac, **self.sizes)


def as_set_up(trainer: Any, report: TrainerReport, set_up: str) -> TrainerReport:
    """Return a report whose `best` is the row `set_up`, which the trainer was told to run, if that fits."""
    row = next((row for row in report.rows if row.ac == set_up), None)
    if row is None or row == report.best:
        return report
    own = own_checkpointing(trainer.args)
    words = f"The trainer is set up with {own[0] if own else f'ac={set_up!r}'}"
    if not row.fits:
        return replace(report, answer=f"{words}, which does not fit: it takes {write_bytes(row.need.bytes)}.")
    assert report.best is not None  # `row` fits
    return replace(report, best=row, answer=f"{words}. Faster, and it fits: ac={report.best.ac!r}.")
