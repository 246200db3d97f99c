"""Which sub-modules of a layer are replayed one by one: its norms, attentions and MLPs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from nemo_like.module_tree import bare, bare_children, join


def submodules_to_checkpoint(layer: nn.Module, *, skip_attention: bool = False) -> list[str]:
    """Names within `layer` of its norms, attentions (or linear attentions) and MLPs, in registration order.

    `skip_attention`: leave attentions out, because replaying one would write a shared key/value cache twice.
    """
    return [name for name, child in _replayable(layer) if not (skip_attention and _is_attention(name, child))]


def _replayable(layer: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name within the layer, child), looking into plain lists (T5's ``layer``)."""
    for name, registered in bare_children(layer):
        child = bare(registered)
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _replayable(child, join(prefix, name))
        elif _is_replayable(name, child):
            yield join(prefix, name), child


def _is_replayable(name: str, child: nn.Module) -> bool:
    """Norms, attentions and MLPs; not single projections and convolutions, which alone gain nothing from a replay."""
    if not any(True for _ in child.parameters()):
        return False
    return "norm" in type(child).__name__.lower() or _is_attention(name, child) or _is_composite(child)


def _is_attention(name: str, child: nn.Module) -> bool:
    words = f"{name.rpartition('.')[2]} {type(child).__name__}".lower()
    return "norm" not in words and any(word in words for word in ("attn", "attention", "mixer", "mamba"))


def _is_composite(child: nn.Module) -> bool:
    """Whether it computes with more than one parameter-bearing piece: an MLP or a mixture of experts."""
    return len(list(child.children())) > 0 or len(list(child.parameters(recurse=False))) > 2
