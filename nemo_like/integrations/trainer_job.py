"""The job of a `transformers.Trainer`, or of one of TRL's: its options as a `Job`, and the call of its model."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from nemo_like._util.log import say_once
from nemo_like._util.module_tree import base_model
from nemo_like._util.rng import random_numbers_put_back
from nemo_like._util.words import parse_dtype, write_bytes
from nemo_like.distributed.documents import LEFT_ALONE
from nemo_like.distributed.launch import world_size
from nemo_like.fake.model_copy import copy_to_keep
from nemo_like.integrations.accelerate_settings import AccelerateSettings, accelerate_settings
from nemo_like.integrations.trainer_batches import largest_batch
from nemo_like.job import Job
from nemo_like.layers import find_layers
from nemo_like.options import DDP, CheckpointConfig, ContextParallel, MemoryBudget, Single, StepSpec
from nemo_like.options.optimizers import TRAINER_OPTIMIZERS, WIDE_EMBEDDINGS
from nemo_like.planning.devices import Device
from nemo_like.precision import Autocast
from nemo_like.transformers_compat import NO_SPLIT, prepared_inputs

# Fields of training arguments by which transformers checkpoints every layer itself, in the order in which it reads them.
_CHECKPOINTS = ("activation_checkpointing", "gradient_checkpointing")
# The key of Liger's configuration for head and loss in one kernel, which it has if it is not told otherwise
# (``_apply_liger_kernel_to_instance``).
_LIGER_LOSS = "fused_linear_cross_entropy"


def job_of_trainer(trainer: Any, **asked: Any) -> Job:
    """Return the job that a trainer runs: by its settings, those of accelerate, and `asked`.

    Args:
        trainer: as its constructor leaves it.
        asked: keywords of `Job.of`: ``ac``, ``loss``, ``cp``, ``offload``.

    Raises:
        NotImplementedError: DeepSpeed, FSDP1 or another way to shard, ``cp`` without FSDP2, an optimizer as `optimizer_of`:
            no plan is made of these.
    """
    args, told = trainer.args, accelerate_settings()
    passes, ranks = args.gradient_accumulation_steps, world_size()
    if asked.get("ac") in (None, "none") and own_checkpointing(args) is not None:
        asked["ac"] = "full"
        if (getattr(args, "activation_checkpointing_kwargs", None) or {}).get("every_n_layers", 1) > 1:
            asked["ac"] = "none"
            say_once(
                "every_n_layers leaves layers without checkpointing: planned as if none had any, which takes more."
            )
    if getattr(args, "use_liger_kernel", False) and (args.liger_kernel_config or {}).get(_LIGER_LOSS, True):
        asked["loss"] = "chunked"  # Liger's loss never makes the logits of all tokens, either.
    step = StepSpec(
        microbatches=passes,
        sync="last" if passes > 1 else "every",
        keeps_output=False,  # compute_loss returns the loss only
        optimizer=optimizer_of(args),
    )
    return Job.of(
        strategy=_strategy(told, trainer, ContextParallel.of(asked.get("cp") or 1).size),
        world_size=ranks,
        step=step,
        precision=told.policy if told.shards else told.precision,
        **asked,
    )


def ac_word(ac: object) -> str:
    """Return a mode or a budget as a report's rows have it; empty: it has no such row."""
    word = ac.mode if isinstance(ac, CheckpointConfig) else ac.words if isinstance(ac, MemoryBudget) else None
    return word if isinstance(word, str) and word != "sequential" else ""


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


def optimizer_of(args: Any) -> str:
    """Return our word for the optimizer of training arguments.

    Raises:
        NotImplementedError: one whose bytes are not known.
    """
    name, more = str(getattr(args.optim, "value", args.optim)), str(args.optim_args or "")
    if name == "sgd" and "momentum" in more:
        return "sgd-momentum"
    if name not in TRAINER_OPTIMIZERS or (name == "rmsprop" and more):  # momentum and centered have states of their own
        raise NotImplementedError(
            f"No plan is made of optim={name!r}{f' with optim_args={more!r}' if more else ''}: the bytes of its state are "
            f"not known. Use one of {', '.join(TRAINER_OPTIMIZERS)}, or a mode instead of a budget."
        )
    return TRAINER_OPTIMIZERS[name]


def _strategy(told: AccelerateSettings, trainer: Any, cp: int) -> Any:
    if told.not_planned:
        raise NotImplementedError(f"accelerate's config has {told.not_planned}, of which no plan is made. Remove it.")
    declared = getattr(base_model(trainer.model), NO_SPLIT, None) or ()
    if told.units is not None and {*told.units} != {*declared}:
        layers = {type(layer.inner).__name__ for layer in find_layers(trainer.model)}
        if {*told.units} != layers:
            raise NotImplementedError(
                f"fsdp_transformer_layer_cls_to_wrap is {', '.join(told.units)}, and a plan has units of the layers, "
                f"{', '.join(layers)}. Remove it."
            )
    if told.other_sharding:
        raise NotImplementedError(f"{told.other_sharding} shards this job, and a plan knows FSDP2 alone.")
    if told.shards:
        return told.shards
    if cp > 1:
        raise NotImplementedError(
            f"cp={cp} without FSDP2 leaves whole weights on each GPU, of which no plan is made. Shard by accelerate's FSDP2 "
            "(fsdp_version: 2), or use a mode such as ac='selective'."
        )
    if world_size() == 1:
        return Single()
    handler = trainer.accelerator.ddp_handler
    if handler is None:
        return DDP(gradient_as_bucket_view=False)  # torch's defaults
    views = handler.gradient_as_bucket_view
    return DDP(handler.find_unused_parameters, handler.bucket_cap_mb, gradient_as_bucket_view=views)


def copy_for_plans(model: nn.Module, shares_sequences: bool) -> nn.Module | None:
    """Return `planned_model`; None, which is logged: the model has something that cannot be copied."""
    try:
        return planned_model(model, shares_sequences)
    except (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError) as error:
        say_once(f"{type(model).__name__} cannot be copied ({error}): no plan is made of this job.")
        return None


def planned_model(model: nn.Module, shares_sequences: bool = False) -> nn.Module:
    """Return a copy of a trainer's model on the meta device, called and cast as accelerate will do it.

    Take it before anything checkpoints or shards the model. `shares_sequences`: ranks split them, and so keep documents
    apart themselves.
    """
    copied, told = copy_to_keep(model), accelerate_settings()
    setattr(copied, LEFT_ALONE, not shares_sequences)
    setattr(copied, WIDE_EMBEDDINGS, True)
    if not told.shards:
        return copied
    if told.precision is not None:
        for parameter in copied.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()  # accelerate: optimizers work on float32
        Autocast(copied, "cpu", parse_dtype("precision", told.precision), None).put()
    return copied


def others_bytes(trainer: Any, device: Device) -> dict[str, int]:
    """Return, by name, the bytes that a trainer keeps on this rank's device and no plan has.

    These are a reference model (DPO, GRPO), and the share of a vLLM in its process that does not sleep in training.
    """
    args, others = trainer.args, dict[str, int]()
    reference = getattr(trainer, "ref_model", None)
    if isinstance(reference, nn.Module):
        size = sum(p.nbytes for p in reference.parameters())
        others["the reference model"] = size // (world_size() if accelerate_settings().shards else 1)
    if getattr(args, "use_vllm", False) and args.vllm_mode == "colocate" and not args.vllm_enable_sleep_mode:
        others["vLLM"] = int(args.vllm_gpu_memory_utilization * device.memory_bytes)
    return others


def without_others(trainer: Any, budget: MemoryBudget, device: Device) -> MemoryBudget:
    """Return the part of a budget that is left to the model that trains.

    Raises:
        ValueError: `others_bytes` are all of it.
    """
    others = others_bytes(trainer, device)
    if not others or budget.fraction is not None:
        return budget
    size = budget.peak_bytes or int(device.memory_bytes * (budget.device_share or 0.0))
    if size <= sum(others.values()):
        raise ValueError(f"ac={str(budget)!r}: {others_words(others)}, and nothing is left. Give a larger budget.")
    return MemoryBudget(peak_bytes=size - sum(others.values()))


def others_words(others: Mapping[str, int]) -> str:
    """Return `others_bytes` in words."""
    return " and ".join(f"{name} alone takes {write_bytes(size)}" for name, size in others.items())


def sample_of(trainer: Any) -> Any:
    """Return the input that a trainer's plans are of: ``ac_sample_input``, or the call for its largest batch."""
    sample = getattr(trainer, "ac_sample_input", None)
    return call_of_model(trainer, largest_batch(trainer)) if sample is None else sample


class _ModelCalledError(Exception):
    """Ends a step where it calls the model."""


def call_of_model(trainer: Any, batch: Any, *, training: bool = True) -> dict[str, Any]:
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
            model.train(training)
            trainer.compute_loss(model, prepared_inputs(trainer, batch), num_items_in_batch=None)
    except _ModelCalledError:
        return seen
    finally:
        model.train(was_training)
    raise ValueError(f"{type(trainer).__name__} does not call its model for a batch. Pass ac_sample_input=.")


def argument(name: str, value: str) -> str:
    """Return the value of a flag as an argument of a trainer; empty: it has none for it."""
    if name != "optimizer":
        return f"{name}={value!r}"
    return next((f"optim={own!r}" for own, word in TRAINER_OPTIMIZERS.items() if word == value), "")
