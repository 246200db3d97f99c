"""Memory of a trainer's evaluation: forward of its largest batch, and the outputs that wait for `compute_metrics`."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_like._util.live_bytes import LiveBytes, storages_of
from nemo_like._util.log import quiet, say_once
from nemo_like._util.tensors import map_tensors
from nemo_like.fake.run import FakeRun, run_forward
from nemo_like.integrations.trainer_batches import find_largest_evaluated
from nemo_like.integrations.trainer_job import call_of_model
from nemo_like.planning.query import PlanQuery, Stage
from nemo_like.torch_compat import FAKE_LOGGER
from nemo_like.transformers_compat import kept_by_evaluation


@dataclass(frozen=True)
class Evaluation:
    """The bytes of an evaluation of the largest batches on one rank, while the optimizer's state is there."""

    base: int  # Bytes that are there between steps, and of FSDP2's gathered units.
    inputs: int  # Bytes of batches.
    forward: int  # The most bytes of a forward without gradients, its output included.
    output: int  # Bytes that the loop keeps of a batch, from all ranks: outputs and labels.
    batches: int  # Batches whose outputs wait on the device; 0: none does.

    @property
    def waiting(self) -> int:
        """Bytes of the outputs that wait while the last batch runs.

        From the third batch on the loop has a name for the last output, which was copied to the others.
        """
        return (max(0, self.batches - 1) + (self.batches > 2)) * self.output

    @property
    def bytes(self) -> int:
        """The most bytes at one time: in the last forward, or as its output is joined to the others, which copies all."""
        joined = 2 * self.batches * self.output if self.batches > 1 else 0
        return self.base + self.inputs + max(self.waiting + self.forward, joined)


def evaluation_of(
    trainer: Any, model: nn.Module, query: Callable[[], PlanQuery], rows: int | None = None
) -> Evaluation | None:
    """Return the memory of a trainer's evaluation; None: it has none, or a stream, or one that is not planned.

    Args:
        trainer: the trainer.
        model: its model on the meta device, as before it was checkpointed and sharded.
        query: returns that of its job.
        rows: rows of a batch; default: the trainer's.
    """
    if (largest := find_largest_evaluated(trainer, rows)) is None:
        return None
    (stage,) = query().stages
    if stage.job.cp.size > 1:
        return None
    try:
        forward, output = _forward(model, call_of_model(trainer, largest.batch, training=False), stage)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:  # a cache that needs values, for example
        say_once(f"No plan is made of the evaluation: {error}")
        return None
    ranks = stage.job.ranks
    labels = (largest.batch.get(name) for name in trainer.label_names)
    output += sum(label.nbytes for label in labels if label is not None)
    # On the CPU the batch that the loader has fetched ahead is there, too.
    inputs = largest.bytes * (2 if stage.device.kind == "cpu" else 1)
    batches = waiting_batches(trainer, rows, ranks)
    return Evaluation(base_bytes(stage), inputs, forward, output * ranks, batches)


def waiting_batches(trainer: Any, rows: int | None, ranks: int) -> int:
    """Return the number of batches whose outputs are on the device together, as transformers' `evaluation_loop` collects."""
    args, data = trainer.args, trainer.eval_dataset
    if trainer.compute_metrics is None or args.prediction_loss_only:
        return 0
    if args.batch_eval_metrics or trainer.preprocess_logits_for_metrics is not None:
        return 1  # the size of its result is not known before it ran
    lengths = [len(each) for each in (data.values() if type(data) is dict else [data])]
    count = math.ceil(max(lengths) / (rows or args.eval_batch_size) / ranks)
    return min(count, args.eval_accumulation_steps or count)


def base_bytes(stage: Stage) -> int:
    """Return the bytes of parameters, optimizer state and DDP's buckets, and of FSDP2's units in a forward.

    The units outside the layers stay gathered, with that of a layer; the next one's is in its buffer.
    """
    sharding = stage.sharding
    size = sharding.params + stage.optimizer.state
    if stage.job.ddp is not None:
        size += sum(unit.grad for unit in sharding.all)
    if sharding.on:
        size += sum(unit.gathered for unit in sharding.outside)
        size += max((unit.gathered + unit.flat for unit in sharding.units), default=0)
    return size


def _forward(model: nn.Module, call: dict[str, Any], stage: Stage) -> tuple[int, int]:
    """Return the most bytes that a forward in evaluation makes, and those of its output but the loss."""
    dtype, sharded = stage.job.param_dtype, stage.job.fsdp is not None
    was_training = model.training
    run = FakeRun(cuda=stage.device.cuda, model=model)
    try:
        with quiet(FAKE_LOGGER), run:
            state = run.state(model.eval(), dtype if sharded else None)
            sample = run.sample(call)
            with torch.no_grad(), LiveBytes() as counter:
                with nullcontext() if sharded or dtype is None else torch.autocast("cpu", dtype):
                    output = run_forward(model, state, (), sample)
                if dtype is not None:  # accelerate's `convert_outputs_to_fp32`
                    output = map_tensors(lambda t: t.float() if t.is_floating_point() else t, output)
        kept = {storage: storage.nbytes() for storage in storages_of(kept_by_evaluation(model, output))}
        return counter.peak, sum(kept.values())
    finally:
        model.train(was_training)
