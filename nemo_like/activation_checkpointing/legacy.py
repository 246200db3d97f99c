"""Checkpointing of modules that the caller holds, by mode: thin surfaces over `apply_specs`."""

from collections.abc import MutableSequence, Sequence

from torch import nn

from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import bare, bare_modules, check_model
from nemo_like._util.words import a_or_an
from nemo_like.activation_checkpointing.apply import apply_specs, check_specs
from nemo_like.activation_checkpointing.policy import Policy, SelectivePolicy
from nemo_like.activation_checkpointing.spec import CheckpointSpec, one_region_each, submodules_to_checkpoint
from nemo_like.options import normalise


def is_selective_activation_checkpointing(value: object) -> bool:
    """True only for the string ``"selective"``, whatever its case, hyphens or outer blanks."""
    return isinstance(value, str) and normalise(value) == "selective"


def apply_full_layer_checkpointing_to_layers(model: nn.Module, layers: MutableSequence[nn.Module]) -> None:
    """Recompute whole layers and save nothing but their inputs. `layers` is changed in place to the wrappers.

    Raises:
        ValueError: a layer is not in `model`.
        TypeError: a layer is already checkpointed. Both change nothing.
    """
    names = names_in(model, layers)
    _replace(layers, names, apply_specs(model, one_region_each(dict.fromkeys(names)), without_cache=False))


def apply_selective_checkpointing_to_layers(
    model: nn.Module,
    layers: MutableSequence[nn.Module],
    has_kv_sharing: bool,
    enable_compile: bool = False,
    *,
    policy: Policy | None = None,
    preserve_rng_state: bool = True,
) -> None:
    """Recompute whole layers and save the outputs that `policy` chooses (default: `SelectivePolicy()`).

    Args:
        model: the model that holds the layers; changed in place.
        layers: changed in place, so that a caller who keeps the list sees the wrappers.
        has_kv_sharing: layers share keys and values through the cache: fall back to sub-modules, with a warning.
        enable_compile: the layers will be compiled; prepares Dynamo for several micro-batches.
        policy: chooses the outputs that each region keeps.
        preserve_rng_state: recompute with the forward's random numbers.

    Raises:
        ValueError: a layer is not in `model`.
        TypeError: a layer is already checkpointed. Both change nothing.
    """
    if has_kv_sharing:
        warn_once(
            "Selective activation checkpointing was asked for, but this model's layers share keys and values through "
            "the cache, which a recomputed attention would write twice: checkpointing MLPs and norms only."
        )
        apply_submodule_checkpointing(layers, has_kv_sharing)
        return
    names = names_in(model, layers)
    specs = one_region_each(
        dict.fromkeys(names),
        policy=SelectivePolicy() if policy is None else policy,
        preserve_rng_state=preserve_rng_state,
    )
    _replace(layers, names, apply_specs(model, specs, compile=enable_compile, without_cache=False))


def apply_submodule_checkpointing(layers: Sequence[nn.Module], has_kv_sharing: bool) -> None:
    """Recompute each layer's MLP, attention (or linear attention) and norms separately; residual sums stay.

    Args:
        layers: changed inside; the list itself stays.
        has_kv_sharing: skip attention, because recomputing it would write the shared cache twice.

    Raises:
        ValueError: a layer has no such child.
        TypeError: a child is already checkpointed. Both change nothing.
    """
    regions: dict[nn.Module, list[CheckpointSpec]] = {}
    for layer in dict.fromkeys(layers):
        names = submodules_to_checkpoint(layer, skip_attention=has_kv_sharing)
        if not submodules_to_checkpoint(layer):
            raise ValueError(
                f"A {type(layer).__name__} has no MLP, attention or norm sub-module to checkpoint; use ac='full' or "
                "'selective', which recompute whole layers."
            )
        regions[layer] = one_region_each(names)
        check_specs(layer, regions[layer])
    for layer, specs in regions.items():
        apply_specs(layer, specs, without_cache=False)  # a layer knows nothing of its model's cache


def names_in(model: nn.Module, layers: Sequence[nn.Module]) -> list[str]:
    """The names in the bare `model` of the modules in `layers`.

    Raises:
        ValueError: an entry is not a registered sub-module of `model`.
    """
    check_model(model)
    names = {bare(module): name for name, module in bare_modules(model) if name}
    for index, layer in enumerate(layers):
        if bare(layer) not in names:
            raise ValueError(
                f"layers[{index}], {a_or_an(layer)}, is not a sub-module of the {type(model).__name__}: "
                "pass modules that the model itself calls."
            )
    return [names[bare(layer)] for layer in layers]


def _replace(layers: MutableSequence[nn.Module], names: Sequence[str], placed: dict[str, nn.Module]) -> None:
    for index, name in enumerate(names):
        layers[index] = placed[name]
