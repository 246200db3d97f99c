"""Memory of a Trainer's job: the largest batch before the first step, and ways to lower the peak where memory runs
out."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nemo_like._util.log import say_once
from nemo_like._util.plain import is_plain_value
from nemo_like._util.rng import random_numbers_put_back
from nemo_like._util.words import write_bytes
from nemo_like.distributed.launch import world_size
from nemo_like.integrations.accelerate_settings import accelerate_settings
from nemo_like.integrations.trainer_batches import find_largest, find_largest_evaluated, largest_batch
from nemo_like.integrations.trainer_evaluation import base_bytes, evaluation_of, waiting_batches
from nemo_like.integrations.trainer_job import argument, call_of_model, others_bytes, others_words, sample_of
from nemo_like.job import Job
from nemo_like.options.optimizers import TRAINER_OPTIMIZERS, TrainedParameter, optimizer_memory
from nemo_like.planning.advise import flag_changes, lowering, saving, where_memory_runs_out
from nemo_like.planning.devices import device_of
from nemo_like.planning.planner import lower_peaks, peak_under, query_of
from nemo_like.planning.query import PlanQuery
from nemo_like.torch_compat import local_part, recorded_snapshot, tree_leaves
from nemo_like.transformers_compat import without_generating

_MOST_CHANGES = 3


# --- the largest batch first --------------------------------------------------------------------------------------------


def try_largest_batch(trainer: Any, model: nn.Module, step: Callable[[Any], Any]) -> None:
    """Run forward and backward of a trainer's largest batch, so that memory runs out now rather than in hours.

    The optimizer's state, which its first step makes, is in memory meanwhile. With gradient accumulation a second pass finds
    the gradients of the first. Weights, buffers, random states and the trainer's counts are afterwards as before.

    Args:
        model: as accelerate prepared it.
        step: the trainer's step on a batch.
    """
    try:
        largest = find_largest(trainer)
    except ValueError as error:  # a stream, for example, which takes no part in the training itself
        say_once(f"No largest batch is tried before the first step. {error}")
        return
    batch = largest.batch
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    # Numbers, and metrics, which are numbers and text in containers, under a name with an underscore; a data set of plain
    # lists is none.
    counts = {
        name: copy.deepcopy(value)
        for name, value in vars(trainer).items()
        if type(value) in (int, float) or (name.startswith("_") and all(map(_counts, tree_leaves(value))))
    }
    state = _state_to_come(trainer.optimizer, trainer.args, model)
    with random_numbers_put_back(trainer.args.device), without_generating(trainer):
        if trainer.args.gradient_accumulation_steps > 1:
            with trainer.accelerator.no_sync(model=model):
                step(copy.copy(batch))
        step(copy.copy(batch))
        model.zero_grad(set_to_none=True)
        evaluated = _try_evaluation(trainer, model) if trainer.args.eval_strategy != "no" else ""
    del state
    vars(trainer).update(counts)
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)
    named = f"The largest batch, {largest.shape}{largest.unknown}"
    say_once(f"{named}, fits: forward, backward and the optimizer's state.{evaluated}")


def _try_evaluation(trainer: Any, model: nn.Module) -> str:
    """Run the evaluation of the largest batch, with memory as large as the outputs that wait; return a sentence on it."""
    if (largest := find_largest_evaluated(trainer)) is None:
        return ""
    model.eval()
    loss_only = trainer.compute_metrics is None or trainer.args.prediction_loss_only
    with advice_where_memory_runs_out(lambda: ways_out_of_evaluation(trainer, *trainer.planned_job())):
        _, *kept = trainer.prediction_step(model, copy.copy(largest.batch), loss_only)
        size = sum(leaf.nbytes for leaf in tree_leaves(kept) if isinstance(leaf, torch.Tensor)) * world_size()
        joined = max(0, 2 * waiting_batches(trainer, None, world_size()) - 1) * size
        torch.empty(joined, dtype=torch.uint8, device=trainer.args.device)
    model.train()
    return f" So does the largest of the evaluation, {largest.shape}{largest.unknown}."


def _counts(value: Any) -> bool:
    """Return whether a value is a number or text."""
    return is_plain_value(value) and not callable(value)


def _state_to_come(optimizer: Any, args: Any, model: nn.Module) -> list[torch.Tensor]:
    """Return memory as large as the state that the optimizer's first step will make; empty: it is there."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if inner is None or inner.state:
        return []
    every = [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
    params, wide = list(map(local_part, every)), {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    name, optim = type(inner).__name__.lower(), str(getattr(args.optim, "value", args.optim))
    # The optimizer of the arguments, or the caller's own.
    word = TRAINER_OPTIMIZERS.get(optim) if name in optim else None
    word = word or ("sgd" if name.startswith("sgd") else "adamw-8bit" if "8bit" in name else "adamw")
    device = params[0].device.type if params else "cpu"
    trained = [
        TrainedParameter(tuple(p.shape), p.numel(), p.element_size(), wide=id(whole) in wide)
        for p, whole in zip(params, every)
    ]
    sizes = optimizer_memory(trained, word, device=device).states
    return [
        torch.empty(size, dtype=torch.uint8, device=param.device)
        for param, states in zip(params, sizes)
        for size in states
    ]


# --- advice where memory runs out -----------------------------------------------------------------------------------------


def advice_where_memory_runs_out(advice: Callable[[], list[str]]) -> AbstractContextManager[None]:
    """Add `advice` to the error of memory that runs out inside. It keeps its type."""

    def told(error: RuntimeError, lines: list[str]) -> RuntimeError:
        error.args = ("\n".join([str(error), *lines]), *error.args[1:])
        return error

    return where_memory_runs_out(
        advice, "No plan can be made of this job ({}). Try ac='full' and a smaller micro-batch.", told
    )


def ways_out(trainer: Any, model: nn.Module, job: Job) -> list[str]:
    """Return the bytes that a step needs by its plan, and the changes that lower them, as arguments of the trainer.

    Args:
        trainer: the trainer, whose largest batch is planned.
        model: its model on the meta device, as before it was checkpointed and sharded.
        job: the job that it runs.
    """
    query = query_of(model, sample_of(trainer), job)
    peak = peak_under(query)

    def tried() -> Iterator[tuple[str, PlanQuery | None]]:
        for values, changed in flag_changes(job, ("ac", "loss", "offload", "optimizer")):
            if words := " ".join(map(argument, values, values.values())):
                yield words, query.changed(changed)
        rows, passes = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
        if rows > 1 and trainer.args.n_gpu <= 1 and getattr(trainer, "ac_sample_input", None) is None:
            half = call_of_model(trainer, largest_batch(trainer, rows=rows // 2))
            fewer = job.change(step=replace(job.step, microbatches=2 * passes, sync="last"))
            words = f"per_device_train_batch_size={rows // 2}, gradient_accumulation_steps={2 * passes}"
            yield words, query_of(model, half, fewer)

    others = others_words(others_bytes(trainer, device_of(job)))
    lines = [
        f"A step of its largest batch takes {write_bytes(peak.total)} of tensors by its plan, {peak.at}"
        f"{others and f'; {others}'}."
    ]
    lines += [f"Lower it by {saving(*each)}" for each in lower_peaks(peak.total, tried())][:_MOST_CHANGES] or [
        "Shorten the rows, or use more GPUs."
    ]
    snapshot = recorded_snapshot()
    if snapshot is not None:
        from nemo_like.explaining.explain import explain

        lines += str(explain(snapshot)).splitlines()[:3]
    return lines


def ways_out_of_evaluation(trainer: Any, model: nn.Module, job: Job) -> list[str]:
    """Return the bytes that an evaluation needs by its plan, and the changes that lower them; arguments as `ways_out`."""
    query = query_of(model, sample_of(trainer), job)
    evaluation = evaluation_of(trainer, model, lambda: query)
    if evaluation is None:
        return ["No plan is made of this evaluation. Set a smaller per_device_eval_batch_size."]

    def tried() -> Iterator[tuple[str, int]]:
        rows = trainer.args.per_device_eval_batch_size
        if rows > 1 and (half := evaluation_of(trainer, model, lambda: query, rows // 2)) is not None:
            yield f"per_device_eval_batch_size={rows // 2}", half.bytes
        if evaluation.batches > 1:
            yield "eval_accumulation_steps=1", replace(evaluation, batches=1).bytes
        for values, changed in flag_changes(job, ("optimizer",)):
            if words := argument("optimizer", values["optimizer"]):
                yield words, replace(evaluation, base=base_bytes(query.under(changed).stages[0])).bytes

    waiting = f", {write_bytes(evaluation.waiting)} of them outputs of other batches" if evaluation.waiting else ""
    return [
        f"An evaluation of its largest batch takes {write_bytes(evaluation.bytes)} of tensors by its plan{waiting}.",
        *(f"Lower it by {saving(*each)}" for each in lowering(evaluation.bytes, tried())[:_MOST_CHANGES]),
    ]


def ways_out_of_saving(trainer: Any, model: nn.Module, job: Job) -> list[str]:
    """Return the bytes that saving gathers, and the way around it; arguments as `ways_out`."""
    if not accelerate_settings().shards:
        return ways_out(trainer, model, job)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return [
        f"Saving a sharded model gathers its whole weights, {write_bytes(whole)}, on a rank. Set fsdp_state_dict_type: "
        "SHARDED_STATE_DICT in accelerate's config, and save by checkpoints (save_strategy)."
    ]
