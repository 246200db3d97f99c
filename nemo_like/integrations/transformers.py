"""`ac=` and `loss=` for `transformers.Trainer`: the model is changed before accelerate shards it.

    @dataclass
    class MyArguments(CheckpointingArguments, transformers.TrainingArguments): ...

    class MyTrainer(CheckpointingMixin, transformers.Trainer): ...

    MyTrainer(model, MyArguments(output_dir, ac="selective", loss="chunked"), ...).train()

or, without a class of your own, ``Trainer(model, args, callbacks=[CheckpointingCallback("selective", loss="chunked")])``.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from nemo_like._util.extras import require
from nemo_like._util.log import say_once
from nemo_like._util.module_tree import base_model
from nemo_like._util.words import a_or_an, write_bytes
from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.distributed.consistency_checks import compare_batches
from nemo_like.distributed.context import apply_context_parallel, check_context_parallel
from nemo_like.distributed.documents import keep_documents_apart
from nemo_like.distributed.launch import world_size
from nemo_like.integrations.accelerate_settings import accelerate_settings
from nemo_like.integrations.activation_offloading import ActivationOffloadingMixin
from nemo_like.integrations.trainer_job import (
    ac_word,
    copy_for_plans,
    job_of_trainer,
    own_checkpointing,
    sample_of,
    without_others,
)
from nemo_like.integrations.trainer_memory import (
    advice_where_memory_runs_out,
    try_largest_batch,
    ways_out,
    ways_out_of_evaluation,
    ways_out_of_saving,
)
from nemo_like.integrations.trainer_report import plan_trainer
from nemo_like.job import Job
from nemo_like.losses.model_loss import chunk_model_loss
from nemo_like.options import CheckpointConfig, ChunkedLoss, ContextParallel, MemoryBudget, parse_ac
from nemo_like.parallelizer import apply_activation_checkpointing
from nemo_like.planning.devices import device_of
from nemo_like.planning.planner import plan_for

__all__ = ["CheckpointingArguments", "CheckpointingCallback", "CheckpointingMixin", "plan_trainer"]

_transformers = require("transformers", "hf", "for the Trainer integration")


@dataclass
class CheckpointingArguments:
    """Fields for a class of training arguments, together with `transformers.TrainingArguments` or a class of TRL's.

    Raises:
        TypeError: where the class is made, one of these fields would hide a field of another base.
    """

    ac: str = field(
        default="none",
        metadata={
            "help": "activation checkpointing: none, full, selective, submodule, sequential, auto, '40GiB', '50%'"
        },
    )
    ac_scope: str = field(
        default="all", metadata={"help": "layers to checkpoint: all, language, vision, audio, multimodal"}
    )
    loss: str = field(
        default="model", metadata={"help": "model, or chunked: head and loss of a few tokens at a time in training"}
    )
    cp: int = field(
        default=1, metadata={"help": "ranks that share each sequence (context parallel); CheckpointingMixin"}
    )
    offload: str = field(
        default="none",
        metadata={"help": "tensors that wait in CPU memory: none, boundary, saved, all; ActivationOffloadingMixin"},
    )
    check_memory: bool | None = field(
        default=None,
        metadata={
            "help": "run forward and backward of the largest batch before the first step (default: on an accelerator); "
            "CheckpointingMixin"
        },
    )

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            theirs = (
                set() if issubclass(base, CheckpointingArguments) else getattr(base, "__dataclass_fields__", {}).keys()
            )
            for name in theirs & CheckpointingArguments.__dataclass_fields__.keys():
                raise TypeError(
                    f"{cls.__name__} mixes CheckpointingArguments with {base.__name__}, and both have a field {name!r}: one "
                    f"would be read as the other. Leave CheckpointingArguments out, and give the trainer {name}= itself."
                )


def refuse_two_kinds_of_checkpointing(args: object) -> None:
    """Raise ValueError where the trainer's own settings ask for activation checkpointing as well.

    `args`: training arguments of any transformers 5 (older names of the settings are read too).
    """
    if (checkpointing := own_checkpointing(args)) is not None:
        setting, way_out = checkpointing
        raise ValueError(
            f"{setting} and ac= both checkpoint the model: it would be recomputed twice. {way_out}, or set ac='none'."
        )


def refuse_a_loss_of_whole_logits(args: object) -> None:
    """Raise ValueError where a trainer with these arguments would not have the model compute its loss in chunks."""
    if smoothing := getattr(args, "label_smoothing_factor", 0):
        raise ValueError(
            f"label_smoothing_factor={smoothing} makes the trainer compute the loss itself, from whole logits, which "
            "loss='chunked' is to avoid. Set label_smoothing_factor=0, or loss='model'."
        )
    whole = "compiles the whole model, which then computes its loss from whole logits, which loss='chunked' is to avoid"
    if getattr(args, "torch_compile", False):
        raise ValueError(f"torch_compile=True {whole}. Set torch_compile=False, or loss='model'.")
    told = accelerate_settings()
    if told.compiler is not None and not told.by_regions:
        raise ValueError(
            f"accelerate's config (dynamo_backend: {told.compiler}) {whole}. Add dynamo_use_regional_compilation: true, "
            "set dynamo_backend: 'NO', or loss='model'."
        )


def checkpoint_for_trainer(
    model: nn.Module, args: object, ac: object, scope: Any = "all", sample_input: object = None, loss: Any = "model"
) -> nn.Module:
    """Checkpoint `model` in place for a trainer with these arguments, and return it; with ``loss="chunked"`` or a
    `ChunkedLoss`, also have it compute its loss in chunks in training.

    Raises:
        ValueError, TypeError: as `nemo_like.apply_activation_checkpointing`; and where the trainer checkpoints too, or
            computes the loss itself.
    """
    in_chunks = ChunkedLoss.of(loss)
    if in_chunks is not None:
        refuse_a_loss_of_whole_logits(args)
        if takes_log_probs_in_chunks(model):
            say_once(
                "loss='chunked' was asked for; TRL's trainer takes log-probabilities in chunks already: left to it."
            )
            in_chunks, loss = None, "model"
    wanted = ac if isinstance(ac, Plan) else parse_ac(ac)
    if isinstance(wanted, CheckpointConfig) and wanted.mode == "none":
        return model if in_chunks is None else chunk_model_loss(model, in_chunks)
    refuse_two_kinds_of_checkpointing(args)
    told = accelerate_settings()
    compiled = bool(getattr(args, "torch_compile", False)) or told.compiler is not None
    autocast = "bf16" if getattr(args, "bf16", False) else "fp16" if getattr(args, "fp16", False) else told.precision
    return apply_activation_checkpointing(
        model, ac, scope, compiled, loss=loss, sample_input=sample_input, autocast=autocast
    )


def _settings(args: object, ac: object, scope: object, loss: object) -> tuple[Any, Any, Any]:
    """Return these settings; where one is None, that of the training arguments."""
    return (
        getattr(args, "ac", "none") if ac is None else ac,
        getattr(args, "ac_scope", "all") if scope is None else scope,
        getattr(args, "loss", "model") if loss is None else loss,
    )


class CheckpointingMixin:
    """Mixes into `transformers.Trainer` and its kind: the model is checkpointed when the trainer is made.

    The settings are the keywords ``ac``, ``ac_scope``, ``loss`` and ``cp``, else the trainer's arguments of these names. A
    trainer with a ``loss`` of its own (sentence-transformers) is given that keyword; ours is read of its arguments then.
    With ``cp``, groups of that many ranks share each batch and split its sequences (`nemo_like.parallelize`). A budget
    is planned for the largest batch of the training set (or ``ac_sample_input``), as accelerate shards and casts it. Works
    with ``model_init`` and with PEFT models. With ``loss="chunked"``, `output.logits` is None in training and whole in
    evaluation, as `compute_metrics` needs them. Where memory runs out in training, evaluation or saving, the error has
    changes that lower the peak.

    Raises:
        ValueError, TypeError: in the constructor, as `checkpoint_for_trainer`.
    """

    # Of the trainer that this is mixed into.
    args: Any
    model: Any
    train_dataset: Any

    def __init__(
        self,
        *args: Any,
        ac: object = None,
        ac_scope: object = None,
        ac_sample_input: object = None,
        loss: Any = None,
        cp: Any = None,
        **kwargs: Any,
    ) -> None:
        if loss is not None and _takes_loss(type(self)):
            kwargs["loss"], loss = loss, None
        self._keywords = (ac, ac_scope, loss)
        self.ac_sample_input, self._cp_keyword = ac_sample_input, cp
        self._ac_ready = self._memory_checked = False
        self._bare: nn.Module | None = None
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        if not isinstance(self, ActivationOffloadingMixin):
            _refuse_unread(arguments, "offload", "none", "ActivationOffloadingMixin among the trainer's bases")
        super().__init__(*args, **kwargs)
        self._ac_ready = True
        self.model = self._checkpointed(self.model)

    def call_model_init(self, trial: object = None) -> nn.Module:
        """The trainer's own, and the new model checkpointed."""
        model = super().call_model_init(trial)  # type: ignore[misc]
        return self._checkpointed(model) if self._ac_ready else model

    def planned_job(self) -> tuple[nn.Module, Job]:
        """Return the trainer's model on the meta device, as it came, and the job that it runs."""
        if self._bare is None:
            raise ValueError(f"{type(self.model).__name__} cannot be copied, so no plan is made of it.")
        ac, _, loss = _settings(self.args, *self._keywords)
        offload = getattr(self, "offloading_setting", None)
        mode = offload if isinstance(offload, str) and offload else "all" if offload is True else "none"
        return self._bare, job_of_trainer(self, ac=ac, loss=loss, cp=self._cp(), offload=mode)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """The trainer's own; before the first one, with ``check_memory``, the largest batch is tried."""
        own = super().training_step  # type: ignore[misc]
        if not self._memory_checked:
            self._memory_checked = True
            if self._checks_memory():
                try_largest_batch(self, model, lambda batch: own(model, batch, num_items_in_batch))
        return own(model, inputs, num_items_in_batch)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own, with advice where memory runs out."""
        with self._advised(ways_out):
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own, with advice where memory runs out."""
        with self._advised(ways_out_of_evaluation):
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own, with advice where memory runs out."""
        with self._advised(ways_out_of_saving):
            return super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _advised(self, ways: Callable[[Any, nn.Module, Job], list[str]]) -> AbstractContextManager[None]:
        return advice_where_memory_runs_out(lambda: ways(self, *self.planned_job()))

    def _checks_memory(self) -> bool:
        wanted = getattr(self.args, "check_memory", None)
        return self.args.device.type != "cpu" if wanted is None else bool(wanted)

    def _checkpointed(self, model: nn.Module) -> nn.Module:
        ac, scope, loss = _settings(self.args, *self._keywords)
        if ChunkedLoss.of(loss) is not None and getattr(self, "compute_loss_func", None) is not None:
            raise ValueError(
                "compute_loss_func= computes the loss from whole logits, which loss='chunked' is to avoid. Drop one, or "
                "call nemo_like.losses.chunked_cross_entropy in the model's forward."
            )
        self._bare = copy_for_plans(model, self._cp().size > 1)
        budget = ac if isinstance(ac, Plan) else parse_ac(ac)
        if isinstance(budget, MemoryBudget):  # planned for the largest batch of the training set, or for the sample
            refuse_two_kinds_of_checkpointing(self.args)
            planned, job = self.planned_job()
            left = without_others(self, budget, device_of(job))
            ac = plan_for(planned, job.change(ac=left, ac_scope=scope), sample_input=sample_of(self))
            layers = Counter(layer.label for layer in ac.layers)
            kinds = ", ".join(f"{count} {label}" for label, count in layers.items())
            say_once(
                f"ac={ac_word(budget)!r} chose, by layers: {kinds}. A step takes {write_bytes(ac.peak_bytes)} of tensors."
            )
        cp = self._cp()
        if cp.size > 1:
            split_for_trainer(model, self, cp)
        return checkpoint_for_trainer(model, self.args, ac, scope, self.ac_sample_input, loss)

    def _cp(self) -> ContextParallel:
        return ContextParallel.of(getattr(self.args, "cp", 1) if self._cp_keyword is None else self._cp_keyword)

    def get_train_dataloader(self) -> Any:
        """The trainer's own; ranks that share sequences get the same batches."""
        return share_batches(super().get_train_dataloader(), self._cp().size)  # type: ignore[misc]

    def get_eval_dataloader(self, *args: object, **kwargs: object) -> Any:
        """As for training."""
        return share_batches(super().get_eval_dataloader(*args, **kwargs), self._cp().size)  # type: ignore[misc]


def split_for_trainer(model: nn.Module, trainer: Any, cp: ContextParallel) -> nn.Module:
    """Have `model` split its sequences over `cp.size` ranks of a trainer's job, in place; returns it.

    Raises:
        ValueError: a number of ranks that `cp` does not divide, or metrics of logits, of which each rank has a part; and
            as `nemo_like.distributed.context.check_context_parallel`.
    """
    ranks = world_size()
    if ranks % cp.size:
        raise ValueError(f"cp is {cp.size}, which does not divide the {ranks} rank(s) of this job.")
    if getattr(trainer, "compute_metrics", None) is not None:
        raise ValueError("cp leaves each rank a part of the logits, and compute_metrics= wants them whole: drop one.")
    mesh = init_device_mesh(trainer.args.device.type, (ranks // cp.size, cp.size), mesh_dim_names=("dp_shard", "cp"))
    check_context_parallel(model, cp)
    compare_batches(model, mesh)
    keep_documents_apart(model)
    return apply_context_parallel(model, mesh["cp"], cp)


def share_batches(loader: object, cp: int) -> Any:
    """`loader` as accelerate prepared it, with the batches of the data-parallel rank, which is ``rank // cp``.

    Raises:
        ValueError: batches are not divided over ranks by a sampler (a stream, or a loader that one rank reads for all).
    """
    sampler: Any = getattr(loader, "batch_sampler", None)
    if cp == 1 or getattr(sampler, "nemo_like_shared", False):
        return loader
    if not hasattr(sampler, "num_processes") or not hasattr(sampler, "process_index"):
        raise ValueError(
            f"cp={cp} gives the ranks of a group the same batches, which needs accelerate's BatchSamplerShard; this loader "
            f"has {a_or_an(sampler)}. Use a data set with a length, and dispatch_batches=False."
        )
    sampler.num_processes, sampler.process_index = sampler.num_processes // cp, sampler.process_index // cp
    sampler.nemo_like_shared = True
    return loader


class CheckpointingCallback(_transformers.TrainerCallback):  # type: ignore[name-defined]
    """Checkpoints the trainer's model at the end of the trainer's construction, before anything is sharded.

    Args:
        ac, scope, loss: see `nemo_like.apply_activation_checkpointing`; None: the training arguments' `ac`, `ac_scope` and
            `loss`.
        sample_input: one batch, as keywords; needed by a budget.

    Raises:
        ValueError, TypeError: when the trainer is made, as `checkpoint_for_trainer`; at the start of training, where
            ``model_init`` has built another model since (use `CheckpointingMixin`).
    """

    def __init__(
        self, ac: object = None, scope: object = None, *, sample_input: object = None, loss: object = None
    ) -> None:
        self.ac, self.scope, self.loss = ac, scope, loss
        self.sample_input = sample_input
        self._model: nn.Module | None = None

    def on_init_end(self, args: object, state: object, control: object, **kwargs: Any) -> None:
        """Checkpoint the model."""
        _refuse_unread(args, "offload", "none", "a trainer with ActivationOffloadingMixin")
        _refuse_unread(args, "cp", 1, "a trainer with CheckpointingMixin")
        ac, scope, loss = _settings(args, self.ac, self.scope, self.loss)
        self._model = checkpoint_for_trainer(kwargs["model"], args, ac, scope, self.sample_input, loss)

    def on_train_begin(self, args: Any, state: object, control: object, **kwargs: object) -> None:
        """Make sure that the model that trains is the one that was checkpointed."""
        if self._model is None:
            raise ValueError(
                "CheckpointingCallback was added after the trainer was made: its model is not checkpointed. Pass it "
                "as Trainer(..., callbacks=[CheckpointingCallback(...)])."
            )
        if kwargs.get("model") is not self._model:
            raise ValueError(
                "The trainer built another model after CheckpointingCallback had checkpointed the first (model_init=). "
                "Use CheckpointingMixin, which checkpoints every model that is built."
            )


def _takes_loss(trainer: type) -> bool:
    """Return whether the trainer that `CheckpointingMixin` is mixed into takes a ``loss`` itself."""
    others = (base for base in trainer.__mro__ if not issubclass(base, CheckpointingMixin))
    return any(
        "loss" in inspect.signature(vars(base)["__init__"]).parameters for base in others if "__init__" in vars(base)
    )


def _refuse_unread(args: object, name: str, off: object, reader: str) -> None:
    value = getattr(args, name, off)
    if value not in (off, None):
        raise ValueError(
            f"{name} is {value!r} in the training arguments, and nothing here reads it. It takes {reader}; or set "
            f"{name}={off!r}."
        )


# Changes that TRL's trainers make to a model before it is checkpointed.


def takes_log_probs_in_chunks(model: nn.Module) -> bool:
    """Return whether TRL has given `model`, or the model inside PEFT's, a forward that never makes the logits of all
    tokens.

    Its trainers ask for that by ``fused_lm_head=True``; such a forward multiplies by the head's weight itself.
    """
    # The forward that it replaces has another signature, which `inspect` would look at first.
    return "fused_lm_head" in inspect.signature(base_model(model).forward, follow_wrapped=False).parameters
