"""The modes that a benchmark compares: ours, and other implementations where they can be imported."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nemo_like.activation_checkpointing.kv_sharing import disable_cache
from nemo_like.compile import compile_layers
from nemo_like.layers import find_layers
from nemo_like.options import AC_STRATEGIES
from nemo_like.parallelizer import apply_activation_checkpointing
from nemo_like.torch_compat import compiler_budget

Apply = Callable[[nn.Module, Any], None]
"""(model, sample input) → None: checkpoint the model in place."""


@dataclass(frozen=True)
class Mode:
    """One way to train the model."""

    name: str
    apply: Apply
    peer: bool = False
    """Another implementation than ours."""
    backend: str | None = None
    """Compile each layer with this back end."""
    around: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    """A context for every forward, such as an offloader's hooks."""

    offloads: bool = False
    """Moves tensors to host memory."""
    isolated: bool = False
    """Needs compiled code of its own: nothing that another mode compiled may be reused."""

    def under(self, backend: str) -> Mode:
        """The same mode with every layer compiled."""
        return Mode(f"{self.name} + {backend}", self.apply, self.peer, backend, self.around, self.offloads)

    def prepare(self, model: nn.Module, sample: Any) -> None:
        """Checkpoint, then compile."""
        disable_cache(model)  # a training step does not use a key-value cache
        self.apply(model, sample)
        if self.backend is not None:
            compile_layers(model, self.backend)
        if self.around is not None:
            model.forward = _within(self.around, model.forward)


def _within(context: Callable[[], contextlib.AbstractContextManager[Any]], forward: Callable[..., Any]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    return run


def our_modes(budgets: tuple[str, ...]) -> list[Mode]:
    """What `parallelize`'s ``ac=`` and ``offload=`` offer."""
    words = [Mode(word, functools.partial(_ours, word)) for word in AC_STRATEGIES]
    planned = [Mode(f"budget {budget}", functools.partial(_budget, budget)) for budget in budgets]
    offloaded = [
        Mode("full + offload boundary", functools.partial(_offloaded, "full", "boundary"), offloads=True),
        Mode("selective + offload saved", functools.partial(_offloaded, "selective", "saved"), offloads=True),
        Mode("offload all", functools.partial(_offloaded, "none", "all"), offloads=True),
    ]
    return words + planned + offloaded


def peer_modes() -> list[Mode]:
    """Other implementations that can be imported here."""
    modes = [
        Mode("torch: checkpoint per layer", _torch_per_layer, peer=True),
        Mode("torch: selective, every 2nd matmul", _torch_selective, peer=True),
    ]
    if importlib.util.find_spec("transformers") is not None:
        modes.append(Mode("transformers: gradient checkpointing", _transformers_own, peer=True))
    if importlib.util.find_spec("trl") is not None:
        modes.append(Mode("trl: OffloadActivations", _nothing, peer=True, around=_trl_offloader, offloads=True))
    return modes


def compiler_budget_modes(backend: str) -> list[Mode]:
    """The compiler's own activation memory budget, which only exists under compilation."""
    return [
        Mode(
            f"torch.compile: memory budget {share} + {backend}",
            _nothing,
            peer=True,
            backend=backend,
            around=functools.partial(compiler_budget, share),
            isolated=True,  # the setting is in no guard of a compiled graph
        )
        for share in (0.25, 0.5)
    ]


def _nothing(model: nn.Module, sample: Any) -> None:
    """Leave the model as it is."""


def _ours(word: str, model: nn.Module, sample: Any) -> None:
    apply_activation_checkpointing(model, word)


def _budget(budget: str, model: nn.Module, sample: Any) -> None:
    apply_activation_checkpointing(model, budget, sample_input=sample)


def _offloaded(word: str, place: str, model: nn.Module, sample: Any) -> None:
    from nemo_like.offload import apply_offloading

    apply_activation_checkpointing(model, word)
    apply_offloading(model, [layer.module for layer in find_layers(model)], place)


def _replace_forward(model: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``make(forward)`` in each layer's place, as the other implementations' own recipes do."""
    for layer in find_layers(model):
        layer.module.forward = make(layer.module.forward)


def _torch_per_layer(model: nn.Module, sample: Any) -> None:
    _replace_forward(model, lambda forward: functools.partial(checkpoint, forward, use_reentrant=False))


def _torch_selective(model: nn.Module, sample: Any) -> None:
    """PyTorch's selective contexts with the rule that torchtitan and NeMo Automodel use: every second mm is dropped."""
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

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op in matmuls:
                counts[context.is_recompute] += 1
            dropped = op in matmuls and counts[context.is_recompute] % 2 == 0
            keep = op in saved and not dropped
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    _replace_forward(
        model, lambda forward: functools.partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
    )


def _transformers_own(model: nn.Module, sample: Any) -> None:
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise ValueError(f"{type(model).__name__} is not a transformers model")
    renamed: Any = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.23 on
    if renamed is not None:
        renamed(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        old: Any = model.gradient_checkpointing_enable
        old(gradient_checkpointing_kwargs={"use_reentrant": False})


@contextlib.contextmanager
def _trl_offloader() -> Iterator[None]:
    module = importlib.import_module("trl.models.activation_offloading")
    with module.OffloadActivations(use_pin_memory=torch.cuda.is_available(), use_streams=torch.cuda.is_available()):
        yield
