"""Key/value caches and checkpointing: when a model is called without its cache, and when a layer may be recomputed whole.

A recomputed attention appends to a key/value cache a second time. Most models need no cache in training, so calls of a
checkpointed model with gradients on go without (`call_without_cache`); its config stays as it is. Models that
hand keys and values from one layer to later ones (Gemma 3n, Gemma 4) do it in one of two ways:

- through the cache: turning it off breaks the model, recomputing attention corrupts it, so attention is not recomputed;
- through a dictionary passed to each layer (``shared_kv_states``, transformers 5.x): the recomputation writes the same
  values under the same key, and every reader's recomputation comes before its writer's, so whole layers may be recomputed
  and the cache is not needed. `tests/activation_checkpointing/test_kv_sharing.py` proves it for both models.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_like.transformers_compat import SHARED_STATES, USE_CACHE, parameter_names

_OF_CONFIGS = ("model_type", "use_cache", "num_kv_shared_layers")  # Attributes that only configs have.


def detect_kv_sharing_and_maybe_disable_cache(model: nn.Module) -> bool:
    """Return whether layers of `model` share keys and values; where they do not, turn its cache off.

    Reads ``num_kv_shared_layers`` of the config or its text config. ``use_cache`` is set to False on the config and
    on every sub-config that has it (a multimodal model's text model reads its own). A model without a ``config`` is
    left as it is.
    """
    sharing = has_kv_sharing(model)
    if not sharing:
        disable_cache(model)
    return sharing


def has_kv_sharing(model: nn.Module) -> bool:
    """Return whether the (text) config has ``num_kv_shared_layers > 0``. Changes nothing."""
    return any((getattr(config, "num_kv_shared_layers", 0) or 0) > 0 for config in configs_of(model))


def needs_cache(model: nn.Module) -> bool:
    """Return whether layers hand keys and values on through the cache, and not by argument, so that it must stay on."""
    return has_kv_sharing(model) and not any(
        SHARED_STATES in parameter_names(module.forward) for module in model.modules()
    )


def disable_cache(model: nn.Module) -> None:
    """Set ``use_cache`` to False on the config and on every sub-config that has it.

    Raises:
        ValueError: a config refuses the change (a frozen dataclass); all configs are as they were then.
    """
    changed: list[tuple[Any, Any]] = []
    for config in [config for config in configs_of(model) if getattr(config, "use_cache", None)]:
        before = config.use_cache
        try:
            config.use_cache = False
        except (AttributeError, TypeError) as error:
            for other, value in changed:
                other.use_cache = value
            raise ValueError(
                f"{type(config).__name__}.use_cache is {before!r} and cannot be set to False ({error}): recomputation would "
                "write the cache a second time. Build the config with use_cache=False."
            ) from error
        changed.append((config, before))


def call_without_cache(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Have the modules of `model` that are around `layers` called with ``use_cache=False`` where gradients are on.

    Put on after checkpointing, as a forward pre-hook of every such module whose forward takes ``use_cache``. A caller's
    own ``use_cache`` counts, and without gradients (`generate`) nothing is changed.
    """
    inside = set(layers)
    for module in [each for each in model.modules() if each not in inside and not inside.isdisjoint(each.modules())]:
        names = parameter_names(module.forward)
        if USE_CACHE in names:
            module.register_forward_pre_hook(_WithoutCache(names.index(USE_CACHE)), with_kwargs=True)


@dataclass(frozen=True)
class _WithoutCache:
    """A forward pre-hook (a class of the module's, so that a model with it can be copied and pickled)."""

    position: int

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        is_set = len(args) > self.position or kwargs.get(USE_CACHE) is not None
        return None if is_set or not torch.is_grad_enabled() else (args, {**kwargs, USE_CACHE: False})


def shares_states_explicitly(layers: Iterable[nn.Module]) -> bool:
    """Return whether every layer is handed shared keys and values as an argument, so that whole layers may be
    recomputed."""
    layers = list(layers)
    return bool(layers) and all(SHARED_STATES in parameter_names(layer.forward) for layer in layers)


def configs_of(model: nn.Module) -> Iterator[Any]:
    """The model's config and every sub-config below it, each once."""
    pending = [getattr(module, "config", None) for module in model.modules()]
    seen: set[int] = set()
    while pending:
        config = pending.pop()
        # A config is an object with attributes of its own; a plain string or mapping named `config` is not one of ours.
        if config is None or id(config) in seen or not (fields := _fields(config)):
            continue
        seen.add(id(config))
        yield config
        pending += [
            value
            for name, value in fields.items()
            if name.endswith("config") or any(hasattr(value, mark) for mark in _OF_CONFIGS)
        ]


def _fields(config: object) -> dict[str, Any]:
    slots = {name: getattr(config, name, None) for name in getattr(type(config), "__slots__", ())}
    return slots | dict(getattr(config, "__dict__", {}))
