"""Activation offloading in a trainer's own words: the names that Hugging Face trainers are extended with.

    class MyTrainer(ActivationOffloadingMixin, transformers.Trainer): ...

    trainer = MyTrainer(model, args, activation_offloading=True, ...)

A thin layer over `nemo_like.offload`. Works with `transformers.Trainer` and TRL's trainers, full fine-tuning and PEFT.
"""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from nemo_like._util.log import warn_once
from nemo_like._util.words import a_or_an, check_whole
from nemo_like.layers import find_layers
from nemo_like.offload import Offloader, offload_activations
from nemo_like.offload.backends import Backend
from nemo_like.offload.mover import Handle, kept
from nemo_like.options import OffloadConfig

# Attributes that models without `get_output_embeddings` call their output head.
_HEAD_NAMES = ("lm_head", "embed_out", "score", "classifier", "head", "output", "proj_out")


class OffloadActivations(Offloader):
    """A context manager: activations that autograd saves inside wait in CPU memory until backward uses them.

    Args:
        use_pin_memory: page-locked CPU memory, which copies during computation require.
        use_streams: copy on streams of their own; False: on the stream that computes.
        min_offload_size: smaller storages stay on the device, bytes.
        max_fwd_stash_size: how many activations forward keeps on the device while they are being copied; at least 1.
        model: its parameters and buffers never move.
        left_out: modules (the output head) from whose call on nothing moves, up to the next call of `model`.
        backend: see `nemo_like.offload.offload_activations`.

    Raises:
        ValueError: `max_fwd_stash_size` is below 1 or `min_offload_size` below 0.

    Where it is disabled, use `NoOpManager`.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_size: int = 1024,
        max_fwd_stash_size: int = 5,
        *,
        model: nn.Module | None = None,
        left_out: tuple[nn.Module, ...] = (),
        backend: Backend | None = None,
    ) -> None:
        check_whole("max_fwd_stash_size", max_fwd_stash_size, 1)
        super().__init__(
            OffloadConfig(mode="all", min_bytes=min_offload_size, pin_memory=use_pin_memory),
            model=model,
            left_out=left_out,
            backend=backend,
            use_streams=use_streams,
            max_inflight_copies=max_fwd_stash_size,
        )


class NoOpManager(torch.autograd.graph.saved_tensors_hooks):
    """A context manager within which nothing is offloaded, whatever is active around it."""

    def __init__(self) -> None:
        super().__init__(kept, Handle.get)


def get_lora_act_offloading_ctx_manager(
    model: nn.Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int = 1024,
    max_fwd_stash_size: int = 5,
    warn_if_no_head: bool = True,
) -> OffloadActivations:
    """The offloading context for `model`, which may be a PEFT model. Make it once, enter it in each training step.

    The output head, and all after it (the loss), is left out: backward starts there, and its tensors would only go
    and come.

    Args:
        model: the model that will be trained.
        use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size: see `OffloadActivations`.
        warn_if_no_head: warn where no output head is found; it is offloaded then like any other module.

    Raises:
        ValueError: as `OffloadActivations`.
    """
    head = output_head(model)
    if head is None and warn_if_no_head:
        warn_once(
            f"Activation offloading found no output head in {a_or_an(model)}: tensors saved there are offloaded "
            "like all others, and come back at once. Pass warn_if_no_head=False if the model has none.",
            key=f"no-output-head-{type(model).__name__}",
        )
    return OffloadActivations(
        use_pin_memory,
        use_streams,
        min_offload_size,
        max_fwd_stash_size,
        model=model,
        left_out=() if head is None else (head,),
    )


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes the model's outputs (logits), or None. Looks inside data-parallel and PEFT wrappers."""
    inner: Any = getattr(model, "module", model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    candidates = [head, *(getattr(inner, name, None) for name in _HEAD_NAMES)]
    return next((candidate for candidate in candidates if isinstance(candidate, nn.Module)), None)


class ActivationOffloadingMixin:
    """Mixes into `transformers.Trainer` and its kind: each training step runs inside an offloading context.

    The setting is the keyword ``activation_offloading``, else `offload` of `CheckpointingArguments`, else
    `activation_offloading` of TRL's arguments, whose own offloader stays off: False, True (everything but the output
    head), a mode (``"boundary"``, ``"saved"``, ``"all"``) or an `OffloadConfig`.
    The offloader is `activation_offload_context`, with its ``stats``; a `NoOpManager` where the setting is False.

    Raises:
        ValueError, TypeError: in the constructor, an unknown setting, or two of them in the arguments.
    """

    def __init__(self, *args: Any, activation_offloading: object = None, **kwargs: Any) -> None:
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        ours, theirs = getattr(arguments, "offload", "none"), getattr(arguments, "activation_offloading", False)
        if theirs and ours != "none":
            raise ValueError(
                f"offload is {ours!r} and activation_offloading is {theirs!r} in the training arguments: both define "
                "which tensors wait in CPU memory. Set one of the two."
            )
        self.offloading_setting = (theirs or ours) if activation_offloading is None else activation_offloading
        # TRL's trainers read the same setting and would put an offloader of their own inside ours.
        with patch.object(arguments, "activation_offloading", False) if theirs else nullcontext():
            super().__init__(*args, **kwargs)
        self.activation_offload_context = offloading_context(getattr(self, "model", None), self.offloading_setting)

    def training_step(self, *args: object, **kwargs: object) -> Any:
        """The trainer's own step, inside the context."""
        if getattr(self.activation_offload_context, "model", self.model) is not self.model:  # type: ignore[attr-defined]
            # `model_init` built another model since
            self.activation_offload_context = offloading_context(self.model, self.offloading_setting)  # type: ignore[attr-defined]
        with self.activation_offload_context:
            return super().training_step(*args, **kwargs)  # type: ignore[misc]


def offloading_context(model: nn.Module | None, setting: Any) -> Any:
    """Return the context for ``activation_offloading=`` of `model`: an offloader, or a `NoOpManager`.

    Raises:
        ValueError, TypeError: an unknown setting.
    """
    if setting is None or setting is False or (isinstance(setting, str) and setting.lower() in ("", "none", "false")):
        return NoOpManager()
    if model is None:
        raise ValueError(f"activation_offloading is {setting!r}, but the trainer has no model yet.")
    if setting is True or (isinstance(setting, str) and setting.lower() == "true"):
        return get_lora_act_offloading_ctx_manager(model)
    head = output_head(model)
    return offload_activations(
        setting,
        model=model,
        layers=[layer.module for layer in find_layers(model)],
        left_out=() if head is None else (head,),
    )
