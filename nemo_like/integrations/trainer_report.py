"""The plan of a trainer's job, with the arguments to paste into the trainer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_like._util.log import say_once
from nemo_like._util.words import write_bytes
from nemo_like.integrations.trainer_evaluation import evaluation_of
from nemo_like.integrations.trainer_job import (
    ac_word,
    argument,
    job_of_trainer,
    others_bytes,
    others_words,
    own_checkpointing,
    planned_model,
    sample_of,
)
from nemo_like.planning.devices import device_of, step_limit
from nemo_like.planning.model.traced import MODES
from nemo_like.planning.planner import query_of
from nemo_like.planning.predict import predict
from nemo_like.planning.predictions.reserved import default_limit
from nemo_like.planning.report import SHARES, PlanReport, ReportRow
from nemo_like.settings.paste import trainer_call


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
    sample, device = sample_of(trainer), device_of(job)
    if others := others_bytes(trainer, device):
        memory = (default_limit(job, device) if memory is None else step_limit(device, memory)) - sum(others.values())
        say_once(f"The plan's limit is lower by the bytes of others: {others_words(others)}.")
    set_up = ac_word(job.ac)
    evaluation = evaluation_of(trainer, model, lambda: query_of(model, sample, job))
    rows = [] if set_up in ("", *MODES) else [*SHARES, set_up]
    report = predict(model, job, sample_input=sample, rows=rows, memory=memory, what_if=what_if)
    args = trainer.args
    sizes = {"batch_size": args.per_device_train_batch_size, "seq_len": getattr(args, "max_length", None)}
    evaluated = 0 if evaluation is None else evaluation.bytes
    changes = (replace(each, change=_OPTIMIZER.sub(_as_argument, each.change)) for each in report.what_if)
    report = replace(report, what_if=tuple(changes))
    return as_set_up(trainer, TrainerReport(**vars(report), sizes=sizes, evaluation_bytes=evaluated), set_up)


_OPTIMIZER = re.compile(r"optimizer='([\w-]+)'")


def _as_argument(match: re.Match[str]) -> str:
    return argument("optimizer", match[1]) or match[0]


@dataclass(frozen=True)
class TrainerReport(PlanReport):
    """The report of a trainer's job: its line to paste is the trainer's arguments."""

    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Rows of a micro-batch on one rank, and the longest row where the trainer cuts rows, by our flags."""
    evaluation_bytes: int = 0
    """The most bytes of an evaluation, the optimizer's state included; 0: it has none, or none that is planned."""

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
    if evaluated := report.evaluation_bytes:
        over = "" if evaluated <= report.limit else ", more than there is: set a smaller per_device_eval_batch_size"
        report = replace(report, answer=f"An evaluation takes {write_bytes(evaluated)} of tensors{over}.")
    row = next((row for row in report.rows if row.ac == set_up), None)
    if row is None or row == report.best:
        return report
    checkpointing = own_checkpointing(trainer.args)
    words = f"{report.answer} The trainer is set up with {checkpointing[0] if checkpointing else f'ac={set_up!r}'}"
    if not row.fits:
        return replace(report, answer=f"{words}, which does not fit: it takes {write_bytes(row.need.bytes)}.".lstrip())
    assert report.best is not None  # `row` fits
    return replace(report, best=row, answer=f"{words}. Faster, and it fits: ac={report.best.ac!r}.".lstrip())
