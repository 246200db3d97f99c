"""`predict`: report whether a training step fits, with which checkpointing, devices, length and batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

import torch
from torch import nn

from nemo_like._util.module_tree import check_model
from nemo_like._util.table import parameters_word
from nemo_like._util.tensors import describe, split_sample
from nemo_like._util.words import check_whole
from nemo_like.fake.model_copy import numbers_of
from nemo_like.flags import BATCH_SIZE, FLAGS, PRECISION, SEQ_LEN, check_keywords
from nemo_like.job import KEYWORDS, AllKeywords, Job
from nemo_like.models import check_positions, class_taken, most_positions, resolve_model, text_batch
from nemo_like.options import parse_dtype
from nemo_like.planning.account import dtype_of
from nemo_like.planning.devices import device_of, step_limit
from nemo_like.planning.predictions.reserved import default_limit
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import PlanReport, Step, fewest, gpu_counts, largest, least_need, make_report
from nemo_like.planning.report import what_if as changes
from nemo_like.planning.sharding import same_on_all_ranks

MOST_TOKENS, MOST_SEQUENCES = 1 << 22, 1 << 12  # Longest sequence and largest micro-batch that are searched.
_TOKENS = 128  # Step of the search for the longest sequence, in tokens for each rank that shares it.


def predict(
    model: nn.Module | str,
    job: Job | None = None,
    *,
    gpus: int | Literal["min"] | None = None,
    seq_len: int | Literal["max"] = SEQ_LEN,
    batch_size: int | Literal["max"] = BATCH_SIZE,
    sample_input: Any = None,
    rows: Sequence[str] = (),
    memory: int | str | None = None,
    dtype: torch.dtype | None = None,
    what_if: bool = False,
    **asked: Unpack[AllKeywords],
) -> PlanReport:
    """Return whether a training step fits, the fastest checkpointing that does, and its cost. Runs nothing on a GPU.

    >>> report = predict("llama-tiny", gpu="h100-80gb", gpus=8, seq_len=128)
    >>> report.best.ac, report.call()
    ('none', "model = parallelize(model, strategy='fsdp2', ac='none', precision='bf16')")

    Args:
        model: a module on any device, ``meta`` included; or a value of ``nemo-like plan --model``.
        job: a `Job`, instead of keywords.
        gpus: devices in all, as the keyword ``world_size``. ``"min"``: the fewest that fit, of whole nodes above one.
        seq_len: tokens per sequence. ``"max"``: the most that fit, in steps of 128.
        batch_size: sequences per rank and micro-batch. ``"max"``: the most that fit.
        sample_input: one micro-batch as the model is called with it, instead of token ids and labels of that size.
        rows: further rows of the report, as they are written after ``ac=``: budgets, and lists of names as JSON.
        memory: bytes that a step may take on each device, or ``"70GiB"``. Default: all but 5 % and the memory outside
            of torch's allocator.
        dtype: dtype of the parameters, where `model` is a name. Default: float32.
        what_if: also report the effects of single changes of the job: `PlanReport.what_if`.
        asked: keywords of `nemo_like.parallelize`, but for ``ac``: every mode is reported. Defaults are those of ``nemo-like
            plan``: ``gpu="h100-80gb"``, ``precision="bf16"``.

    Raises:
        ValueError, TypeError: a wrong argument, two questions at once, a model without repeated layers, or one that does
            not fit at any size.
    """
    if isinstance(model, nn.Module):
        check_model(model)
    if job is not None and asked:
        raise ValueError(f"job is given, and so is {next(iter(asked))}. Put it into the job: job.change(...).")
    if "ac" in asked:
        raise TypeError("predict() has no keyword 'ac'. A plan reports every ac; rows=['40GiB'] adds one.")
    check_keywords(predict, asked, KEYWORDS)
    stored = dtype_of(model) if isinstance(model, nn.Module) else dtype
    usual = {
        "ac": "none",
        "gpu": FLAGS["gpu"].default,
        "precision": None if stored == parse_dtype("", PRECISION) else PRECISION,
    }
    job = Job.of(**{**usual, **asked}) if job is None else job
    if gpus is not None and gpus != "min":
        check_whole("gpus", gpus, 1)
        job = job.change(world_size=gpus)
    for size_of, size in (("seq_len", seq_len), ("batch_size", batch_size)):
        if size != "max":
            check_whole(size_of, size, 1)
    if sample_input is not None and batch_size == "max":
        raise ValueError("sample_input has a size of its own. For batch_size='max', leave it out.")
    step, name = step_of(
        model,
        job,
        SEQ_LEN if seq_len == "max" else seq_len,
        1 if batch_size == "max" else batch_size,
        sample_input,
        dtype,
    )
    search = searched_size(gpus=gpus, seq_len=seq_len, batch_size=batch_size)
    limit = None if memory is None else step_limit(device_of(job), memory)

    def make() -> PlanReport:
        asked_step, query, report = answered(step, search, name, rows, limit)
        return replace(report, what_if=tuple(changes(asked_step, query, report))) if what_if else report

    return same_on_all_ranks(make)


def step_of(
    model: nn.Module | str,
    job: Job,
    seq_len: int = SEQ_LEN,
    batch_size: int = BATCH_SIZE,
    sample_input: Any = None,
    dtype: torch.dtype | None = None,
) -> tuple[Step, str]:
    """Return a step of `model`, and the model's name; arguments as for `predict`."""
    built, source = (model, None) if isinstance(model, nn.Module) else resolve_model(model).built("meta", dtype)
    name = type(built).__name__ if source is None else source.name
    fixed_input = sample_input if source is None or sample_input is not None else source.sample
    own_length = 0 if fixed_input is not None else seq_len

    def given(batch: int, length: int) -> tuple[Any, str]:
        if fixed_input is not None:
            sample = source.sample_of(batch) if source is not None and fixed_input is source.sample else fixed_input
            return sample, describe(*split_sample(sample))
        predicted = name if length <= own_length else ""  # longer ones of `what_if` are not
        return text_of(built, batch, length, predicted), f"{batch} x {length} tokens"

    return Step(built, job, given, batch_size, own_length), name


_SEARCHED = {"gpus": "min", "seq_len": "max", "batch_size": "max"}


def searched_size(**sizes: object) -> str:
    """Return the name of the one of these sizes, out of `_SEARCHED`, that is searched for; empty: none is.

    Raises:
        ValueError: several are.
    """
    searched = [name for name, size in sizes.items() if size == _SEARCHED[name]]
    if len(searched) > 1:
        raise ValueError("gpus='min', seq_len='max' and batch_size='max' are one question each. Ask one at a time.")
    return "".join(searched)


def answered(
    step: Step,
    search: str,
    name: str,
    rows: Sequence[str] = (),
    limit: int | None = None,
    query: PlanQuery | None = None,
) -> tuple[Step, PlanQuery, PlanReport]:
    """Return `step` with the size `search` (`searched_size`) set to the answer, its query, and its report.

    Args:
        step: the step; its own value of the searched size is where the search begins.
        name: the model's, for the report.
        rows, limit: as for `make_report`.
        query: of `step`, where it is traced already.

    Raises:
        ValueError: no number of devices, no length or no batch fits.
    """
    step, answer = _asked(step, search, limit, name)
    if query is None or answer:
        query = step.query()
    report = make_report(query, rows, limit, tokens=tokens_of(step.input[0]), about=about(query, step, name))
    return step, query, replace(report, answer=answer)


def _asked(step: Step, search: str, limit: int | None, name: str) -> tuple[Step, str]:
    job = step.job

    def needs(**change: Any) -> int:
        query = step.query(**change)
        job_limit = default_limit(query.job, device) if limit is None else limit
        # A job whose own limit is lower needs so much more of `most`.
        return least_need(query, job_limit) + most - job_limit

    device = device_of(job)
    most = step_limit(device) if limit is None else limit
    if search == "gpus":
        counts = gpu_counts(job, device.gpus_per_node)
        best = fewest(lambda count: needs(job=job.change(world_size=count)), counts, most)
        if best is None:
            raise ValueError(f"No number of GPUs up to {counts[-1]:,} fits. Give a smaller batch, or tp= or cp=.")
        return replace(step, job=job.change(world_size=best)), f"Fewest GPUs: {best:,}."
    if search == "batch_size":
        best = largest(lambda size: needs(batch=size), step.batch, most, MOST_SEQUENCES)
        if not best:
            raise ValueError("Not even a micro-batch of one sequence fits. Give more GPUs, or a shorter sequence.")
        more = " or more" if best == MOST_SEQUENCES else ""
        return replace(step, batch=best), f"Largest micro-batch: {best:,}{more}."
    if search == "seq_len":
        if not step.seq_len:
            raise ValueError(f"{name} has a sample input, whose length is not known: none can be searched for.")
        known = most_positions(getattr(step.model, "config", None))
        positions = known or MOST_TOKENS
        size = job.cp.size * job.tp.size * (_TOKENS if positions >= 8 * _TOKENS else 1)
        best = largest(lambda length: needs(seq_len=length), SEQ_LEN, most, positions, size)
        if not best:
            raise ValueError(f"Not even a sequence of {size} tokens fits. Give more GPUs, or a smaller batch.")
        note = ", all that its config has positions for" if known else " or more"
        note = note if best + size > positions else ""
        return replace(step, seq_len=best), f"Longest sequence: {best:,} tokens{note}."
    return step, ""


def text_of(model: nn.Module, batch: int, length: int, predicted: str = "") -> dict[str, torch.Tensor]:
    """Return token ids and labels, both (batch, length), for a model of transformers.

    Args:
        predicted: as for `nemo_like.models.check_positions`.

    Raises:
        ValueError: it has no config, or fewer positions.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(
            f"{type(model).__name__} has no config, so its input is unknown. Give sample_input=, one micro-batch."
        )
    check_positions(config, "seq_len", length, predicted)
    return text_batch(batch, length)


def tokens_of(sample: Any) -> int | None:
    """Return the tokens of one micro-batch; None: it takes no text."""
    if isinstance(sample, Mapping):
        sample = next((sample[key] for key in ("input_ids", "labels") if key in sample), None)
    if not isinstance(sample, torch.Tensor) or sample.is_floating_point():
        return None
    return sample.numel()


def about(query: PlanQuery, step: Step, name: str) -> str:
    """Return the model, its input and the devices, in a line."""
    count, job, micro = sum(map(numbers_of, step.model.parameters())), query.job, query.microbatches
    layers = ", ".join(map(str, query.counts))
    stages = f" in {len(query.stages)} stages of {layers} layers ({query.pp.schedule})" if query.is_pipeline else ""
    times = f"{micro} micro-batches of " if micro > 1 else ""
    return (
        f"{name} ({parameters_word(count)} parameters){class_taken(step.model)}{stages} on {job.ranks} x "
        f"{query.device.name}, {job.step.optimizer}, {times}{step.input[1]} per rank; {query.device.about}"
    )
