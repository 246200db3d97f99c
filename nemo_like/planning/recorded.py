"""What a model reads of its layers besides their outputs: transformers records routers' logits, attentions by hooks.

A layer that a fake run does not run must still give them, or the model's own router loss has nothing to add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from nemo_like.torch_compat import forward_hooks
from nemo_like.transformers_compat import RECORDERS

Record = tuple[str, tuple, Any]
"""The name of a module within its layer, what it was called with, and its output."""


def _hooks(layer: nn.Module) -> Iterator[tuple[str, nn.Module, Callable]]:
    """The recorders below `layer`, by module name; those on the layer itself are called with it."""
    for name, part in layer.named_modules():
        for hook in forward_hooks(part):
            if name and getattr(hook, "__module__", None) == RECORDERS:
                yield name, part, hook


@contextmanager
def recording(layer: nn.Module) -> Iterator[list[Record]]:
    """Within it, what the recorders below `layer` see is noted, one entry for each module and call."""
    seen: list[Record] = []
    with ExitStack() as stack:
        for name, part in {name: part for name, part, _ in _hooks(layer)}.items():

            def note(module: nn.Module, args: tuple, output: Any, name: str = name) -> None:
                seen.append((name, args, output))

            stack.callback(part.register_forward_hook(note).remove)
        yield seen


def record_again(layer: nn.Module, records: Sequence[Record]) -> None:
    """Give the recorders below `layer`, which is not run, what they would have seen."""
    hooks = list(_hooks(layer)) if records else []
    for name, args, output in records:
        for at, part, hook in hooks:
            if at == name:
                hook(part, args, output)
