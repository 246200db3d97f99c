"""The modes that a benchmark compares: ours, and PyTorch's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nemo_like.activation_checkpointing.kv_sharing import disable_cache
from nemo_like.compile import compile_layers
from nemo_like.layers import find_layers
from nemo_like.losses.model_loss import chunk_model_loss
from nemo_like.offload import apply_offloading
from nemo_like.options import AC_STRATEGIES, ChunkedLoss, OffloadConfig, did_you_mean, normalise
from nemo_like.parallelizer import apply_activation_checkpointing

# Smaller storages are not offloaded: less than the default, so that small models show something too.
MIN_BYTES = 1 << 16

# (model, sample input): change the model in place; return the bytes moved to CPU memory so far, if it offloads.
Apply = Callable[[nn.Module, Any], Callable[[], int] | None]


@dataclass(frozen=True)
class Mode:
    """One way to train the model."""

    name: str
    apply: Apply
    peer: bool = False  # Another implementation than ours.
    backend: str | None = None  # Compile each layer with this back end.
    on_cpu: bool = True  # False: it does nothing where tensors are in CPU memory already.

    def under(self, backend: str) -> Mode:
        """The same mode with every layer compiled."""
        return Mode(f"{self.name} + {backend}", self.apply, self.peer, backend)

    def prepare(self, model: nn.Module, sample: object) -> Callable[[], int]:
        """Checkpoint or offload `model` in place, then compile; return the bytes moved to CPU memory so far."""
        disable_cache(model)  # a training step does not use a key-value cache
        moved = self.apply(model, sample)
        if self.backend is not None:
            compile_layers(model, self.backend)
        return moved or (lambda: 0)


def our_modes(budgets: Sequence[str]) -> list[Mode]:
    """Return the modes that `parallelize`'s ``ac=``, ``offload=`` and ``loss=`` offer."""
    return [
        *(Mode(word, functools.partial(_ours, word)) for word in AC_STRATEGIES),
        *(Mode(f"budget {budget}", functools.partial(_budget, budget)) for budget in budgets),
        _offloaded("full + offload boundary", "full", OffloadConfig(mode="boundary", min_bytes=MIN_BYTES)),
        _offloaded("selective + offload saved", "selective", OffloadConfig(mode="saved", min_bytes=MIN_BYTES)),
        _offloaded("offload all", "none", OffloadConfig(mode="all", min_bytes=MIN_BYTES)),
        Mode("chunked loss", _chunked_loss),
    ]


def _offloaded(name: str, word: str, config: OffloadConfig) -> Mode:
    def apply(model: nn.Module, sample: object) -> Callable[[], int]:
        apply_activation_checkpointing(model, word)
        stats = apply_offloading(model, [layer.module for layer in find_layers(model)], config).stats
        return lambda: stats.moved_bytes

    return Mode(name, apply)


def peer_modes() -> list[Mode]:
    """PyTorch's own implementations."""
    return [
        Mode("torch: checkpoint per layer", _torch_per_layer, peer=True),
        Mode("torch: selective, every 2nd matmul", _torch_selective, peer=True),
        Mode("torch: save_on_cpu", _save_on_cpu, peer=True, on_cpu=False),
    ]


def pick(modes: list[Mode], names: Sequence[str] | None) -> list[Mode]:
    """The modes called `names`, after ``none``; None: all of them.

    Raises:
        ValueError: an unknown name.
    """
    if names is None:
        return modes
    known = {normalise(mode.name): mode for mode in modes}
    for name in names:
        if normalise(name) not in known:
            there = [mode.name for mode in modes]
            raise ValueError(
                f"There is no mode {name!r} here; there are: {'; '.join(there)}.{did_you_mean(name, there)}"
            )
    return [known["none"]] + [known[normalise(name)] for name in names if normalise(name) != "none"]


def _ours(word: str, model: nn.Module, sample: object) -> None:
    apply_activation_checkpointing(model, word)


def _budget(budget: str, model: nn.Module, sample: object) -> None:
    apply_activation_checkpointing(model, budget, sample_input=sample)


def _chunked_loss(model: nn.Module, sample: object) -> None:
    chunk_model_loss(model, ChunkedLoss())


def _torch_per_layer(model: nn.Module, sample: object, **settings: Any) -> None:
    """Put torch's `checkpoint` in the place of each layer's forward, as PyTorch's own recipes do."""
    for layer in find_layers(model):
        layer.module.forward = functools.partial(checkpoint, layer.module.forward, use_reentrant=False, **settings)


def _torch_selective(model: nn.Module, sample: object) -> None:
    """Apply PyTorch's selective contexts with the rule of torchtitan and NeMo Automodel: every second mm is dropped."""
    ops = torch.ops.aten
    matmuls = {ops.mm.default, ops.linear.default}
    saved = matmuls | {
        ops._scaled_dot_product_efficient_attention.default,
        ops._scaled_dot_product_flash_attention.default,
        ops._scaled_dot_product_flash_attention_for_cpu.default,
        ops.max.default,
    }

    def contexts() -> Any:
        counts = {False: 0, True: 0}

        def policy(context: Any, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
            if op in matmuls:
                counts[context.is_recompute] += 1
            dropped = op in matmuls and counts[context.is_recompute] % 2 == 0
            return CheckpointPolicy.MUST_SAVE if op in saved and not dropped else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    _torch_per_layer(model, sample, context_fn=contexts)


def _save_on_cpu(model: nn.Module, sample: object) -> None:
    kind, forward = next(model.parameters()).device.type, model.forward

    def run(*args: object, **kwargs: object) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type=kind):
            return forward(*args, **kwargs)

    model.forward = run
