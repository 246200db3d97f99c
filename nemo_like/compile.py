"""Per-layer compilation: one small graph per repeated layer, compiled once and reused for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as TorchCheckpointWrapper

from nemo_like.activation_checkpointing.regions import SELECTIVE_AC_WRAPPER_FLAG, unwrap_checkpoint_wrapper
from nemo_like.config import did_you_mean, normalise
from nemo_like.layers import find_layers

COMPILE_BACKENDS = ("inductor", "aot_eager", "eager")


def parse_compile(compile: Any) -> str | None:
    """The backend that ``compile=`` asks for; None for no compilation.

    Raises:
        ValueError: an unknown backend. TypeError: neither a bool, None nor a string.
    """
    if compile is None or compile is False:
        return None
    if compile is True:
        return "inductor"
    if not isinstance(compile, str):
        raise TypeError(f"compile is {compile!r}; it must be a bool or one of {', '.join(COMPILE_BACKENDS)}.")
    backend = normalise(compile)
    if backend not in COMPILE_BACKENDS:
        raise ValueError(
            f"compile is {compile!r}; it must be False, True ('inductor') or one of {', '.join(COMPILE_BACKENDS)}."
            + did_you_mean(backend, COMPILE_BACKENDS)
        )
    return backend


def compile_layers(model: nn.Module, backend: str = "inductor", layers: Iterable[nn.Module] | None = None) -> None:
    """Compile each repeated layer of `model` in place with `nn.Module.compile`; no name changes (no ``_orig_mod``).

    A whole-layer selective wrapper is compiled itself, so that the partitioner reads the recompute tags. Any other
    wrapper is compiled inside: its replay runs the compiled layer again.

    Args:
        model: changed in place.
        backend: ``"inductor"``, ``"aot_eager"`` (PyTorch's kernels, compiled autograd graph) or ``"eager"``.
        layers: the layers, wrapped or not; None: found by `nemo_like.layers.find_layers`.

    Raises:
        ValueError: an unknown backend, or a model without repeated layers.
    """
    resolved = parse_compile(backend)
    if resolved is None:
        return
    chosen = [found.module for found in find_layers(model)] if layers is None else list(layers)
    for layer in chosen:
        for module in _to_compile(layer):
            # Regions with different inputs (masked or not, several dtypes) recompile instead of giving up on the graph.
            module.compile(backend=resolved)


def _to_compile(layer: nn.Module) -> list[nn.Module]:
    if isinstance(layer, TorchCheckpointWrapper):
        return [layer if getattr(layer, SELECTIVE_AC_WRAPPER_FLAG, False) else unwrap_checkpoint_wrapper(layer)]
    inside = [m._checkpoint_wrapped_module for m in layer.modules() if isinstance(m, TorchCheckpointWrapper)]
    return inside or [layer]
