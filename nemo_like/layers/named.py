"""The layers that a caller names: by FQN, by glob or by object."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from nemo_like._util.module_tree import bare, bare_children, bare_modules, bare_name, glob_to_regex, join
from nemo_like._util.words import a_or_an
from nemo_like.layers.structure import is_container
from nemo_like.options import did_you_mean


class LayersNotFoundError(ValueError):
    """No repeated layers were found, or a layer that the caller named is not in the model or overlaps another."""


def named_by_caller(
    model: nn.Module, layers: Iterable[str | nn.Module] | str | nn.Module
) -> list[tuple[str, nn.Module]]:
    """(FQN, module) of each layer that `layers` means, in registration order. Errors as in `find_layers`."""
    if isinstance(layers, str | nn.Module):
        layers = [layers]
    elif not isinstance(layers, Iterable):
        raise TypeError(f"layers is {layers!r}, {a_or_an(layers)}; it must be a list of names or modules.")
    tree = list(bare_modules(model))
    by_name = dict(tree)
    chosen: dict[int, tuple[str, nn.Module]] = {}
    for item in layers:
        exact = bare_name(item) if isinstance(item, str) else None
        hits = [(exact, by_name[exact])] if exact and exact in by_name else _matches(model, tree, item)
        for fqn, module in hits:
            members = [(fqn, module)]
            if is_container(module):
                members = [(join(fqn, name), child) for name, child in bare_children(module)]
            for name, member in members:
                chosen.setdefault(id(bare(member)), (name, member))
    if not chosen:
        raise LayersNotFoundError("layers= is empty; leave it out to have the layers found, or name at least one.")
    order = {id(bare(module)): index for index, (_, module) in enumerate(tree)}
    found = sorted(chosen.values(), key=lambda pair: order[id(bare(pair[1]))])
    _refuse_overlap(found)
    return found


def _matches(model: nn.Module, tree: list[tuple[str, nn.Module]], item: object) -> list[tuple[str, nn.Module]]:
    """The (FQN, module) pairs that one entry of ``layers=`` means; at least one, or an error naming the entry."""
    if isinstance(item, nn.Module):
        hits = [(fqn, module) for fqn, module in tree if bare(module) is bare(item)]
        # A list that the caller made of the model's own blocks is not part of the model, its members are.
        if not hits and is_container(item):
            return [hit for _, child in bare_children(item) for hit in _matches(model, tree, child)]
        if not hits:
            raise LayersNotFoundError(
                f"layers= holds {a_or_an(item)} object that is not part of this {type(model).__name__}; "
                "pass modules of the very model that is to be parallelized."
            )
    elif isinstance(item, str):
        pattern = glob_to_regex(bare_name(item))
        hits = [(fqn, module) for fqn, module in tree if fqn and pattern.fullmatch(fqn)]
        if not hits:
            known = [fqn for fqn, _ in tree if fqn]
            raise LayersNotFoundError(
                f"layers= names {item!r}, which matches no module of this {type(model).__name__}."
                + (did_you_mean(item, known) or f" It has: {', '.join(known[:12])}{', ...' * (len(known) > 12)}.")
            )
    else:
        raise TypeError(f"layers= holds {item!r}, {a_or_an(item)}; it must hold names (str) or modules.")
    if any(fqn == "" for fqn, _ in hits) and not is_container(bare(model)):
        raise LayersNotFoundError("layers= holds the model itself; name modules inside it.")
    return hits


def _refuse_overlap(found: list[tuple[str, nn.Module]]) -> None:
    inside: dict[int, str] = {}
    for fqn, module in found:
        for part in bare(module).modules():
            if part is not bare(module):
                inside.setdefault(id(part), fqn)
    for fqn, module in found:
        if (outer := inside.get(id(bare(module)))) is not None:
            raise LayersNotFoundError(
                f"layers= names both {outer!r} and {fqn!r}, which is inside it; layers must not overlap."
            )
