"""Find a model's repeated layers: named by the caller, declared by the model, or found by structure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from nemo_like._util.module_tree import (
    bare,
    bare_children,
    bare_modules,
    bare_name,
    check_model,
    glob_to_regex,
    join,
    registered,
)
from nemo_like._util.table import grouped
from nemo_like._util.words import a_or_an
from nemo_like.layers.groups import GROUPS, groups_of
from nemo_like.layers.structure import (
    blocks_in_series,
    child_series,
    class_of,
    has_declared_base,
    has_mixer_outside,
    has_names,
    is_callable,
    is_container,
    is_nested,
    is_sequence,
    is_strict_block,
    parameter_count,
)
from nemo_like.options import did_you_mean, normalise
from nemo_like.transformers_compat import NO_SPLIT

# Sibling modules of one class are stages (Swin stages), and their inner blocks are the layers, from this share of their
# parameters on: inner blocks that the model declares are known, others must be all but a little of the stages.
_STAGE_SHARE_DECLARED = 0.5
_STAGE_SHARE = 0.9
# Runs of plainer blocks (no norm, no mixer: a vocoder's residual blocks) next to strict ones count from this share of
# the model's parameters on. Smaller ones are heads and predictors: not worth a sharding unit of their own.
_PLAIN_SHARE = 0.02


@dataclass(frozen=True)
class Layer:
    """One repeated layer of a model."""

    fqn: str
    """Name in the original model, without the segments that wrappers add."""
    module: nn.Module
    """The registered child: the outermost wrapper where the layer is wrapped."""
    group: str
    """``language`` | ``vision`` | ``audio`` | ``other``."""

    @property
    def inner(self) -> nn.Module:
        """The layer itself, inside of its wrappers."""
        return bare(self.module)


def find_layers(
    model: nn.Module, layers: Iterable[str | nn.Module] | str | nn.Module | None = None
) -> tuple[Layer, ...]:
    """The repeated layers of `model`, in registration order, none nested in another and each object once.

    In this order: `layers`, if given; else classes that a Hugging Face model declares (subclasses of its
    checkpointable layer class and ``_no_split_modules``, read as attributes), and the homogeneous runs (`ModuleList`,
    `ModuleDict`, digit-keyed children, `nn.Sequential`) of the parts that declare nothing. Nothing is called or
    allocated, so models on the meta device, compiled, checkpointed, adapted (PEFT) and sharded (FSDP2) models work
    alike.

    Args:
        model: any module.
        layers: FQNs of the original model, globs over them (``*`` within one dotted segment, ``**`` across segments) or
            module objects; the name of a `ModuleList` or `ModuleDict` means its members.

    Raises:
        LayersNotFoundError: (a ValueError) nothing was found, with the candidates and how to name one; or a name or
            object in `layers` is not in the model, or two of them overlap.
        TypeError: `layers` holds something else.
    """
    check_model(model)
    if layers is not None:
        names = named_by_caller(model, layers)
    elif not (names := _Finder(model).find()):
        raise LayersNotFoundError(_nothing_found(model))
    return tuple(Layer(fqn, registered(model, fqn), group) for fqn, group in zip(names, groups_of(model, names)))


def layer_groups(
    model: nn.Module, layers: Iterable[str | nn.Module] | str | nn.Module | None = None
) -> dict[str, list[nn.Module]]:
    """`find_layers`, as one list of modules for each group that occurs (language, vision, audio, other)."""
    return grouped((layer.group, layer.module) for layer in find_layers(model, layers))


class _Finder:
    """One walk down a model. Top-down, so that a layer is met before anything inside it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.no_split = _no_split_names(model)
        self.least_plain = _PLAIN_SHARE * parameter_count(model)
        self.by_name = False  # Members of a `ModuleDict` by words can be layers.
        self.found: list[str] = []
        self.seen: set[int] = set()
        self.layers: set[int] = set()

    def find(self) -> list[str]:
        """Return the names of the layers."""
        self._visit(bare(self.model), "")
        if not self.found:
            self.by_name = True
            self.seen.clear()
            self._visit(bare(self.model), "")
        return self.found

    def _visit(self, module: nn.Module, fqn: str) -> None:
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        if id(module) in self.layers:
            self.found.append(fqn)
            self.seen.update(id(inner) for inner in module.modules())  # no layer under another name either
            return
        self.layers |= {id(layer) for layer in self._layers_among_children(module)}
        for name, child in bare_children(module):
            self._visit(child, join(fqn, name))

    def _layers_among_children(self, parent: nn.Module) -> list[nn.Module]:
        """The children of `parent`, or of the lists in it, that are layers: declared or repeated, and no stages."""
        series = [] if has_names(parent) and not self.by_name else child_series(parent)
        candidates = {id(child): child for each in series for child in self._run(parent, each)}
        for _, child in bare_children(parent):
            if has_declared_base(child):
                candidates.setdefault(id(child), child)
        by_class = grouped(
            (class_of(candidate), candidate) for candidate in candidates.values() if is_callable(candidate)
        )
        return [child for siblings in by_class.values() if not self._are_stages(siblings) for child in siblings]

    def _run(self, parent: nn.Module, series: list[nn.Module]) -> list[nn.Module]:
        """The layers among siblings: declared ones; else strict blocks; else plain blocks that hold enough."""
        declared = list(filter(self._is_declared, series))
        if declared:  # in one list, blocks of other kinds next to declared ones are layers, too
            return [c for c in series if c in declared or (is_container(parent) and is_strict_block(c))]
        strict = blocks_in_series(parent, series, strict=True)
        if strict:
            return strict
        plain = blocks_in_series(parent, series, strict=False)
        return plain if parameter_count(*plain) >= self.least_plain else []

    def _is_declared(self, module: nn.Module) -> bool:
        """Return whether the model declares `module` a block. "Do not split" also names embeddings, mixers and
        heads."""
        return has_declared_base(module) or (class_of(module).__name__ in self.no_split and is_strict_block(module))

    def _are_stages(self, siblings: list[nn.Module]) -> bool:
        """Return whether `siblings` are mostly runs of blocks, so that those are the layers and not they themselves."""
        blocks = [block for sibling in siblings for block in self._inner_blocks(sibling)]
        share = parameter_count(*blocks) / max(parameter_count(*siblings), 1)
        if any(has_declared_base(block) for block in blocks):
            return share >= _STAGE_SHARE_DECLARED
        return (
            bool(blocks)
            and share >= _STAGE_SHARE
            and not any(has_mixer_outside(sibling, blocks) for sibling in siblings)
        )

    def _inner_blocks(self, module: nn.Module) -> list[nn.Module]:
        """Declared or strict single-class runs in lists anywhere inside `module`, outermost first."""
        blocks: list[nn.Module] = []
        if is_sequence(module):
            series = [child for each in child_series(module) for child in each]
            inner = list(filter(self._is_declared, series)) or blocks_in_series(module, series, strict=True)
            blocks = inner if is_nested(module) or len({class_of(child) for child in inner}) == 1 else []
        for _, child in bare_children(module):
            if not any(child is block for block in blocks):
                blocks += self._inner_blocks(child)
        return blocks


def _no_split_names(model: nn.Module) -> frozenset[str]:
    """Class names that any model or encoder in the tree wants in one piece."""
    declared = [getattr(module, NO_SPLIT, None) or () for module in model.modules()]
    return frozenset(name for names in declared for name in ([names] if isinstance(names, str) else names))


def _nothing_found(model: nn.Module) -> str:
    """The message of the error: every list in the model, its members, and how to name it."""
    lists, weights = [], dict[str, int]()
    for fqn, module in bare_modules(model):
        members = [class_of(child).__name__ for _, child in bare_children(module)]
        if is_sequence(module) and members:
            lists.append((fqn, f"{len(members)} x {', '.join(dict.fromkeys(members))}"))
            callable_members = all(is_callable(child) for _, child in bare_children(module))
            weights[fqn] = parameter_count(module) if callable_members else -1
    start = f"No repeated layers were found in this {type(model).__name__}"
    if lists:
        shown = "\n".join(f"  {fqn or '(the model itself)'}: {what}" for fqn, what in lists[:20])
        return (
            f"{start}: a layer is a member of a list, with at least two parts that hold weights. Candidates:\n{shown}"
            + ("\n  ...\n" if len(lists) > 20 else "\n")
            + f"Name the layers yourself, for example layers=[{join(max(weights, key=weights.__getitem__), '*')!r}]."
        )
    children = ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children()) or "none"
    return (
        f"{start}, which holds no list of modules; its children are: {children}. "
        "Name the modules to treat as layers, for example layers=['name_of_child']."
    )


# The layers that a caller names: by FQN, by glob or by object.


class LayersNotFoundError(ValueError):
    """No repeated layers were found, or a layer that the caller named is not in the model or overlaps another."""


def named_by_caller(model: nn.Module, layers: Iterable[str | nn.Module] | str | nn.Module) -> list[str]:
    """The FQN of each layer that `layers` means, in registration order. Errors as in `find_layers`."""
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
            inside = [(join(fqn, name), child) for name, child in bare_children(module)]
            for name, member in inside if is_container(module) else [(fqn, module)]:
                chosen.setdefault(id(member), (name, member))
    if not chosen:
        raise LayersNotFoundError("layers= is empty; leave it out to have the layers found, or name at least one.")
    order = {id(module): index for index, (_, module) in enumerate(tree)}
    in_order = sorted(chosen.values(), key=lambda pair: order[id(pair[1])])
    _refuse_overlap(in_order)
    return [name for name, _ in in_order]


def _matches(model: nn.Module, tree: list[tuple[str, nn.Module]], item: object) -> list[tuple[str, nn.Module]]:
    """The (FQN, module) pairs that one entry of ``layers=`` means; at least one, or an error naming the entry."""
    if isinstance(item, nn.Module):
        inner = bare(item)
        hits = [(fqn, module) for fqn, module in tree if module is inner]
        # A list that the caller made of the model's own blocks is not part of the model, its members are.
        if not hits and is_container(inner):
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
            names = [fqn for fqn, _ in tree if fqn]
            raise LayersNotFoundError(
                f"layers= names {item!r}, which matches no module of this {type(model).__name__}."
                + (did_you_mean(item, names) or f" It has: {', '.join(names[:12])}{', ...' * (len(names) > 12)}.")
            )
    else:
        raise TypeError(f"layers= holds {item!r}, {a_or_an(item)}; it must hold names (str) or modules.")
    if any(fqn == "" for fqn, _ in hits) and not is_container(bare(model)):
        raise LayersNotFoundError("layers= holds the model itself; name modules inside it.")
    return hits


def _refuse_overlap(chosen: list[tuple[str, nn.Module]]) -> None:
    inside: dict[int, str] = {}
    for fqn, module in chosen:
        for part in module.modules():
            if part is not module:
                inside.setdefault(id(part), fqn)
    for fqn, module in chosen:
        if (outer := inside.get(id(module))) is not None:
            raise LayersNotFoundError(
                f"layers= names both {outer!r} and {fqn!r}, which is inside it; layers must not overlap."
            )


# Which of the layers found a caller means: a modality scope.

# "multimodal" is the users' word for everything that is not the language model.
_SCOPES = {"all": GROUPS, "multimodal": ("vision", "audio"), **{group: (group,) for group in GROUPS}}


def is_frozen(module: nn.Module) -> bool:
    """True where `module` has parameters and none of them trains. LoRA adapters in a frozen layer train."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def select_layers(layers: Sequence[Layer], scope: str | Iterable[str] = "all") -> tuple[Layer, ...]:
    """The layers of `found` in `scope`, in their order.

    Args:
        layers: the layers from `find_layers`.
        scope: ``"all"``, ``"language"``, ``"vision"``, ``"audio"``, ``"other"``, ``"multimodal"`` (vision and audio),
            or a list of these.

    Raises:
        ValueError: a scope is unknown, or nothing is left; the message lists the groups of the layers.
        TypeError: `scope` is neither a string nor a list of strings.
    """
    wanted = {group for word in _parse_scope(scope) for group in _SCOPES[word]}
    selected = [layer for layer in layers if layer.group in wanted]
    if not selected:
        counts = Counter(layer.group for layer in layers).items()
        there = ", ".join(f"{count} {group} layer{'s' if count > 1 else ''}" for group, count in counts) or "no layers"
        raise ValueError(f"scope {scope!r} selects no layer; this model has {there}.")
    return tuple(selected)


def _parse_scope(scope: str | Iterable[str]) -> list[str]:
    scopes = [scope] if isinstance(scope, str) else list(scope) if isinstance(scope, Iterable) else [scope]
    if not all(isinstance(word, str) for word in scopes):
        raise TypeError(f"scope is {scope!r}; it must be one of {', '.join(_SCOPES)} or a list of these.")
    for word in scopes:
        if normalise(word) not in _SCOPES:
            raise ValueError(
                f"scope {word!r} is unknown; it must be one of {', '.join(_SCOPES)}."
                + did_you_mean(normalise(word), list(_SCOPES))
            )
    if not scopes:
        raise ValueError(f"scope is empty; it must name at least one of {', '.join(_SCOPES)}.")
    return [normalise(word) for word in scopes]
