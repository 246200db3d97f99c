"""Which of a model's layers a `CheckpointConfig` means: by class, by name pattern, by measured bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from nemo_like.layers import Layer
from nemo_like.layers.groups import group_of
from nemo_like.log import say_once, warn_once
from nemo_like.module_tree import bare, bare_modules, bare_name, glob_to_regex
from nemo_like.options import CheckpointConfig, did_you_mean

MB = 10**6


def choose_layers(
    model: nn.Module,
    candidates: Iterable[Layer],
    config: CheckpointConfig,
    saved_bytes: Mapping[str, int] | None = None,
) -> tuple[Layer, ...]:
    """The layers that `config` wants checkpointed, in the model's order.

    `config.layer_classes` replaces the candidates by the modules of these classes in or among them. Then a layer is
    in if an include pattern matches its name, out if an exclude pattern matches it or a module that holds it, and
    otherwise in if it saves more than `config.memory_threshold_mb`, or if nothing was measured.

    Args:
        model: the model that holds them; not changed.
        candidates: the layers in scope.
        config: its patterns are globs over the names of the bare model: ``*`` within a dotted segment, ``**`` across.
        saved_bytes: measured activation bytes by layer name; None: not measured.

    Raises:
        ValueError: a class or pattern matches nothing; the message names the field and what there is.
    """
    if config.snn_timestep_checkpoint:
        return ()  # timesteps instead of layers: see nemo_like.cells, where the patterns name cells
    layers = tuple(candidates)
    if config.layer_classes is not None:
        layers = _of_classes_within(model, layers, config.layer_classes)
    modules = [name for name, _ in bare_modules(model) if name]
    included = _matching("include_patterns", config.include_patterns, [layer.fqn for layer in layers])
    excluded = _matching("exclude_patterns", config.exclude_patterns, modules)
    measured = config.profile_before_apply and saved_bytes is not None
    if config.profile_before_apply and saved_bytes is None:
        warn_once(
            "CheckpointConfig.profile_before_apply asks for a measurement, but there is neither a profile nor a sample "
            "input: memory_threshold_mb is not used, and every layer that no pattern excludes is checkpointed. Pass a "
            "profile, or set profile_before_apply=False."
        )
    chosen = tuple(
        layer
        for layer in layers
        if layer.fqn in included
        or (
            not _is_within(layer.fqn, excluded)
            and (not measured or (saved_bytes or {}).get(layer.fqn, 0) > config.memory_threshold_mb * MB)
        )
    )
    if not chosen:
        say_once(_nothing_chosen(layers, config, saved_bytes if measured else None))
    return chosen


def layers_of_classes(model: nn.Module, classes: Sequence[str]) -> tuple[Layer, ...]:
    """The modules of `model` whose class has one of these names; of nested ones the outermost."""
    found: list[Layer] = []
    for name, module in bare_modules(model):
        inside_another = any(name.startswith(f"{layer.fqn}.") for layer in found)
        if name and type(bare(module)).__name__ in classes and not inside_another:
            found.append(Layer(name, module, group_of(model, name)))
    return tuple(found)


def class_names(model: nn.Module) -> list[str]:
    """The class names of the modules in `model`, those that occur most often first."""
    counts: dict[str, int] = {}
    for name, module in bare_modules(model):
        if name:
            kind = type(bare(module)).__name__
            counts[kind] = counts.get(kind, 0) + 1
    return sorted(counts, key=lambda kind: -counts[kind])


def _of_classes_within(model: nn.Module, scope: Sequence[Layer], classes: Sequence[str]) -> tuple[Layer, ...]:
    matches = layers_of_classes(model, classes)
    within = tuple(
        match
        for match in matches
        if any(match.fqn == layer.fqn or match.fqn.startswith(f"{layer.fqn}.") for layer in scope)
    )
    if not within:
        known = class_names(model)
        why = "only outside the layers in scope" if matches else "nowhere in the model"
        raise ValueError(
            f"CheckpointConfig.layer_classes is {list(classes)}, and such modules are {why}, which has "
            f"{', '.join(known[:12])}.{did_you_mean(classes[0], known) if classes else ''}"
        )
    return within


def _matching(field: str, patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """The `names` that a pattern matches; every pattern must match one."""
    matched: set[str] = set()
    for pattern in patterns:
        regex = glob_to_regex(bare_name(pattern))
        hits = {name for name in names if regex.fullmatch(name)}
        if not hits:
            shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            raise ValueError(
                f"CheckpointConfig.{field} holds {pattern!r}, which matches no layer; '*' stays within one dotted "
                f"segment, '**' crosses them. There are: {shown}.{did_you_mean(pattern, names)}"
            )
        matched |= hits
    return matched


def _is_within(name: str, modules: set[str]) -> bool:
    """Whether `modules` holds `name` or a module above it."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in modules for end in range(1, len(parts) + 1))


def _nothing_chosen(layers: Sequence[Layer], config: CheckpointConfig, saved: Mapping[str, int] | None) -> str:
    if saved is None:
        return f"CheckpointConfig.exclude_patterns leaves none of the {len(layers)} layers to checkpoint."
    largest = max((saved.get(layer.fqn, 0) for layer in layers), default=0)
    return (
        f"No layer saves more than memory_threshold_mb={config.memory_threshold_mb:g} MB (the largest: "
        f"{largest / MB:.3f} MB), so nothing is checkpointed."
    )
