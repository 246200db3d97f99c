"""The modes that a benchmark compares: ours, and other implementations where they can be imported."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nemo_like.activation_checkpointing.kv_sharing import disable_cache
from nemo_like.compile import compile_layers
from nemo_like.layers import find_layers
from nemo_like.offload import apply_offloading
from nemo_like.options import AC_STRATEGIES, OffloadConfig, did_you_mean, normalise
from nemo_like.parallelizer import apply_activation_checkpointing
from nemo_like.torch_compat import compiler_budget


@dataclass
class Copies:
    """Bytes that a way of offloading has copied so far."""

    moved: Callable[[], int] = lambda: 0
    back: Callable[[], int] = lambda: 0
    stalls: Callable[[], int] = lambda: 0
    host_peak: Callable[[], int] | None = None
    known: bool = True
    """False: another implementation, which does not count."""


Apply = Callable[[nn.Module, Any], Copies | None]
"""(model, sample input): checkpoint or offload the model in place; what it copies, if it offloads."""


@dataclass(frozen=True)
class Mode:
    """One way to train the model."""

    name: str
    apply: Apply
    peer: bool = False
    """Another implementation than ours."""
    backend: str | None = None
    """Compile each layer with this back end."""
    offloads: bool = False
    """Moves tensors to host memory."""
    isolated: bool = False
    """Needs compiled code for itself: nothing that another mode compiled may be reused."""

    def under(self, backend: str) -> Mode:
        """The same mode with every layer compiled."""
        return Mode(f"{self.name} + {backend}", self.apply, self.peer, backend, self.offloads)

    def prepare(self, model: nn.Module, sample: object) -> Copies:
        """Checkpoint, then compile."""
        disable_cache(model)  # a training step does not use a key-value cache
        copies = self.apply(model, sample)
        if self.backend is not None:
            compile_layers(model, self.backend)
        return copies or Copies()


def our_modes(budgets: Sequence[str]) -> list[Mode]:
    """Return the modes that `parallelize`'s ``ac=`` and ``offload=`` offer."""
    words = [Mode(word, functools.partial(_ours, word)) for word in AC_STRATEGIES]
    planned = [Mode(f"budget {budget}", functools.partial(_budget, budget)) for budget in budgets]
    return [
        *words,
        *planned,
        offloaded("full + offload boundary", "full", OffloadConfig(mode="boundary")),
        offloaded("selective + offload saved", "selective", OffloadConfig(mode="saved")),
        offloaded("offload all", "none", OffloadConfig(mode="all")),
    ]


def offloaded(name: str, word: str, config: OffloadConfig) -> Mode:
    """Checkpointing `word` with offloading by `config`."""

    def apply(model: nn.Module, sample: object) -> Copies:
        apply_activation_checkpointing(model, word)
        stats = apply_offloading(model, [layer.module for layer in find_layers(model)], config).stats
        return Copies(
            lambda: stats.moved_bytes,
            lambda: stats.reloaded_bytes,
            lambda: stats.offload_stalls + stats.reload_stalls,
            lambda: stats.host_peak_live_bytes,
        )

    return Mode(name, apply, offloads=True)


def peer_modes() -> list[Mode]:
    """Other implementations that can be imported here."""
    modes = [
        Mode("torch: checkpoint per layer", _torch_per_layer, peer=True),
        Mode("torch: selective, every 2nd matmul", _torch_selective, peer=True),
    ]
    if importlib.util.find_spec("transformers") is not None:
        modes.append(Mode("transformers: gradient checkpointing", _transformers_own, peer=True))
    return modes + trl_modes()


def trl_modes() -> list[Mode]:
    """TRL's offloader, where TRL is installed."""
    there = importlib.util.find_spec("trl") is not None
    return [Mode("trl: OffloadActivations", _trl, peer=True, offloads=True)] if there else []


def compiler_budget_modes(backend: str) -> list[Mode]:
    """The compiler's own activation memory budget, which only exists under compilation."""
    return [
        Mode(
            f"torch.compile: memory budget {share} + {backend}",
            functools.partial(_compiler_budget, share),
            peer=True,
            backend=backend,
            isolated=True,  # the setting is in no guard of a compiled graph
        )
        for share in (0.25, 0.5)
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
            hint = did_you_mean(name, there)
            raise ValueError(f"There is no mode {name!r} here; there are: {'; '.join(there)}.{hint}")
    return [known["none"]] + [known[normalise(name)] for name in names if normalise(name) != "none"]


def _ours(word: str, model: nn.Module, sample: object) -> None:
    apply_activation_checkpointing(model, word)


def _budget(budget: str, model: nn.Module, sample: object) -> None:
    apply_activation_checkpointing(model, budget, sample_input=sample)


def _compiler_budget(share: float, model: nn.Module, sample: object) -> None:
    _around_forward(model, functools.partial(compiler_budget, share))


def _around_forward(model: nn.Module, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """Have every forward of `model` run within a `context`."""
    forward = model.forward

    def run(*args: object, **kwargs: object) -> Any:
        with context():
            return forward(*args, **kwargs)

    model.forward = run


def _replace_forward(model: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``make(forward)`` in each layer's place, as the other implementations' own recipes do."""
    for layer in find_layers(model):
        layer.module.forward = make(layer.module.forward)


def _torch_per_layer(model: nn.Module, sample: object) -> None:
    _replace_forward(model, lambda forward: functools.partial(checkpoint, forward, use_reentrant=False))


def _torch_selective(model: nn.Module, sample: object) -> None:
    """Apply PyTorch's selective contexts with the rule of torchtitan and NeMo Automodel: every second mm is dropped."""
    ops = torch.ops.aten
    saved = {
        ops.mm.default,
        ops.linear.default,
        ops._scaled_dot_product_efficient_attention.default,
        ops._scaled_dot_product_flash_attention.default,
        ops._scaled_dot_product_flash_attention_for_cpu.default,
        ops.max.default,
    }
    matmuls = {ops.mm.default, ops.linear.default}

    def contexts() -> Any:
        counts = {False: 0, True: 0}

        def policy(context: Any, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
            if op in matmuls:
                counts[context.is_recompute] += 1
            dropped = op in matmuls and counts[context.is_recompute] % 2 == 0
            keep = op in saved and not dropped
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    _replace_forward(
        model, lambda forward: functools.partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
    )


def _transformers_own(model: nn.Module, sample: object) -> None:
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise ValueError(f"{type(model).__name__} is not a transformers model")
    renamed: Any = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.23 on
    if renamed is not None:
        renamed(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        old: Any = model.gradient_checkpointing_enable
        old(gradient_checkpointing_kwargs={"use_reentrant": False})


def save_on_cpu(model: nn.Module, sample: object) -> Copies:
    """Offload with PyTorch's ``save_on_cpu``, and count what it copies."""
    device = next(model.parameters()).device
    inner = torch.autograd.graph.save_on_cpu(pin_memory=device.type != "cpu", device_type=device.type)
    moved = [0, 0]

    def pack(tensor: torch.Tensor) -> Any:
        moved[0] += tensor.nbytes
        return inner.pack_hook(tensor)

    def unpack(packed: object) -> torch.Tensor:
        tensor = inner.unpack_hook(packed)
        moved[1] += tensor.nbytes
        return tensor

    _around_forward(model, lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack))
    return Copies(lambda: moved[0], lambda: moved[1])


def _trl(model: nn.Module, sample: object) -> Copies:
    if next(model.parameters()).device.type == "cpu":
        raise RuntimeError("it offloads accelerator tensors only")
    manager = importlib.import_module("trl.models.activation_offloading").get_act_offloading_ctx_manager(model)
    _around_forward(model, lambda: manager)
    return Copies(known=False)
