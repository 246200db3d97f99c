"""Which modules of a model are its repeated layers: named by the caller, declared by the model, or found by structure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from nemo_like.config import did_you_mean
from nemo_like.layers.groups import group_of
from nemo_like.layers.names import bare, bare_children, bare_modules, bare_name, glob_to_regex, join
from nemo_like.layers.structure import (
    blocks_in_series,
    child_series,
    class_of,
    is_container,
    is_stage,
    is_strict_block,
)

# The base class from which Hugging Face models derive every block they can checkpoint, looked up by name: nothing here
# imports transformers.
_DECLARED_BASE = "GradientCheckpointingLayer"


@dataclass(frozen=True)
class Layer:
    """One repeated layer of a model."""

    fqn: str
    """Name in the bare model, without the segments that wrappers add."""
    module: nn.Module
    """The registered child: the outermost wrapper where the layer is wrapped."""
    group: str
    """``language`` | ``vision`` | ``audio`` | ``other``."""


class LayersNotFoundError(ValueError):
    """No repeated layers were found, or a layer that the caller named is not in the model."""


def find_layers(model: nn.Module, layers: Iterable[str | nn.Module] | str | nn.Module | None = None) -> tuple[Layer, ...]:
    """The repeated layers of `model`, in registration order, none nested in another and each object once.

    In this order: `layers`, if given; else what a Hugging Face model declares (``GradientCheckpointingLayer``
    subclasses and ``_no_split_modules``, read as attributes) together with the homogeneous runs (`ModuleList`,
    `ModuleDict`, digit-keyed children, `nn.Sequential`) outside of those. Nothing is called or allocated, so models on
    the meta device, compiled, checkpointed, adapter (PEFT) and FSDP2 models work alike.

    Args:
        model: any module.
        layers: FQNs of the bare model, globs over them (``*`` within one dotted segment, ``**`` across segments) or
            module objects; the name of a `ModuleList` or `ModuleDict` stands for its members.

    Raises:
        LayersNotFoundError: (a ValueError) nothing was found, with the candidates and how to name one; or a name or
            object in `layers` is not in the model, or two of them overlap.
        TypeError: `layers` holds something else.
    """
    if layers is not None:
        found = _named_by_caller(model, layers)
    else:
        found = _found_by_structure(model)
        if not found:
            raise LayersNotFoundError(_nothing_found(model))
    return tuple(Layer(fqn, module, group_of(model, fqn)) for fqn, module in found)


def layer_groups(model: nn.Module, layers: Iterable[str | nn.Module] | None = None) -> dict[str, list[nn.Module]]:
    """`find_layers`, as one list of modules for each group that occurs (language, vision, audio, other)."""
    groups: dict[str, list[nn.Module]] = {}
    for layer in find_layers(model, layers):
        groups.setdefault(layer.group, []).append(layer.module)
    return groups


def _found_by_structure(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Declared blocks and strict runs; where there are none of either, runs of plainer blocks (an MLP's)."""
    names = _no_split_names(model)
    for strict in (True, False):
        found: list[tuple[str, nn.Module]] = []
        _visit(model, "", names, strict, found, set(), in_run=False)
        if found:
            return found
    return []


def _visit(
    module: nn.Module, fqn: str, names: frozenset[str], strict: bool, found: list, seen: set[int], *, in_run: bool
) -> None:
    """Walk down from `module`, which is no layer itself unless `in_run` or declared, and append layers to `found`."""
    if id(bare(module)) in seen:
        return
    seen.add(id(bare(module)))
    if fqn and (in_run or _is_declared(module, names)) and not is_stage(module):
        found.append((fqn, module))
        seen.update(id(inner) for inner in bare(module).modules())  # nothing inside is a layer under another name
        return
    members: set[str] = set()
    for _, series in child_series(module):
        sequential = isinstance(bare(module), nn.Sequential)
        members |= {child.name for child in blocks_in_series(series, strict=strict, sequential=sequential)}
    for name, child in bare_children(module):
        _visit(child, join(fqn, name), names, strict, found, seen, in_run=name in members)


def _no_split_names(model: nn.Module) -> frozenset[str]:
    """Class names that any model or tower in the tree asks to keep in one piece."""
    names: set[str] = set()
    for module in model.modules():
        declared = getattr(module, "_no_split_modules", None)
        if declared:
            names.update([declared] if isinstance(declared, str) else declared)
    return frozenset(names)


def _is_declared(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether the model declares `module` a block. "Do not split" also names embeddings and heads: those are none."""
    cls = class_of(module)
    if any(base.__name__ == _DECLARED_BASE for base in cls.__mro__):
        return True
    return cls.__name__ in names and is_strict_block(module) and "Embedding" not in cls.__name__


def _named_by_caller(
    model: nn.Module, layers: Iterable[str | nn.Module] | str | nn.Module
) -> list[tuple[str, nn.Module]]:
    wanted = [layers] if isinstance(layers, str | nn.Module) and not isinstance(layers, nn.ModuleList) else list(layers)  # type: ignore[arg-type]
    tree = list(bare_modules(model))
    chosen: dict[int, tuple[str, nn.Module]] = {}
    for item in wanted:
        for fqn, module in _matches(model, tree, item):
            members = [(fqn, module)]
            if is_container(module):
                members = [(join(fqn, name), child) for name, child in bare_children(module)]
            for name, member in members:
                chosen.setdefault(id(bare(member)), (name, member))
    order = {id(bare(module)): index for index, (_, module) in enumerate(tree)}
    found = sorted(chosen.values(), key=lambda pair: order[id(bare(pair[1]))])
    if not found:
        raise LayersNotFoundError("layers= is empty; leave it out to have the layers found, or name at least one.")
    _refuse_overlap(found)
    return found


def _matches(model: nn.Module, tree: list[tuple[str, nn.Module]], item: object) -> list[tuple[str, nn.Module]]:
    """The (FQN, module) pairs that one entry of ``layers=`` means; at least one, or an error naming the entry."""
    if isinstance(item, nn.Module):
        hits = [(fqn, module) for fqn, module in tree if bare(module) is bare(item)]
        if not hits:
            raise LayersNotFoundError(
                f"layers= holds a {type(item).__name__} object that is not part of this {type(model).__name__}; "
                "pass modules of the very model that is to be parallelized."
            )
        return hits
    if not isinstance(item, str):
        raise TypeError(f"layers= holds {item!r}, a {type(item).__name__}; it must hold names (str) or modules.")
    pattern = glob_to_regex(bare_name(item))
    hits = [(fqn, module) for fqn, module in tree if fqn and pattern.fullmatch(fqn)]
    if not hits:
        known = [fqn for fqn, _ in tree if fqn]
        raise LayersNotFoundError(
            f"layers= names {item!r}, which matches no module of this {type(model).__name__}."
            + (did_you_mean(item, known) or f" It has: {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}.")
        )
    return hits


def _refuse_overlap(found: list[tuple[str, nn.Module]]) -> None:
    inside: dict[int, str] = {}
    for fqn, module in found:
        for part in bare(module).modules():
            if part is not bare(module):
                inside.setdefault(id(part), fqn)
    for fqn, module in found:
        if id(bare(module)) in inside:
            raise LayersNotFoundError(
                f"layers= names both {inside[id(bare(module))]!r} and {fqn!r}, which is inside it; layers must not overlap."
            )


def _nothing_found(model: nn.Module) -> str:
    """The message of the error: every list in the model, what it holds, and how to name it."""
    lines = []
    for fqn, module in bare_modules(model):
        if is_container(module) or isinstance(bare(module), nn.Sequential):
            members = [class_of(child).__name__ for _, child in bare_children(module)]
            if members:
                kinds = ", ".join(dict.fromkeys(members))
                lines.append(f"  {fqn or '(the model itself)'}: {len(members)} x {kinds}")
    example = next((line.split(":")[0].strip() for line in lines), None)
    if lines:
        shown = "\n".join(lines[:20]) + ("\n  ..." if len(lines) > 20 else "")
        pattern = "*" if example == "(the model itself)" else f"{example}.*"
        return (
            f"No repeated layers were found in this {type(model).__name__}: a layer is a member of a list that repeats, "
            f"with at least two parts that have parameters. Candidates:\n{shown}\n"
            f"Name the layers yourself, for example layers=[{pattern!r}]."
        )
    children = ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children()) or "no children"
    return (
        f"No repeated layers were found in this {type(model).__name__}, which holds no list of modules; its children "
        f"are: {children}. Name the modules to treat as layers, for example layers=['name_of_child']."
    )
