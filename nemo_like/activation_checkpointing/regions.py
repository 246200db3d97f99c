"""Which pieces of a model are replayed as one: the module wrapper, and the functions that put it in place.

Every function here changes the model in place, and checks what it was given before it changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence, Sequence
from typing import Any

import torch
from torch import nn

from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.activation_checkpointing.kv_sharing import CACHE_ARGUMENTS, cache_positions
from nemo_like.activation_checkpointing.nameless import Nameless
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy, SelectivePolicy
from nemo_like.activation_checkpointing.transfer import Transfer
from nemo_like.log import warn_once
from nemo_like.options import normalise
from nemo_like.torch_compat import CheckpointWrapper as TorchCheckpointWrapper
from nemo_like.torch_compat import disable_dynamo_lru_cache, wrapped_module

SELECTIVE_AC_WRAPPER_FLAG = "_nemo_like_selective_ac"
"""Set on whole-layer selective wrappers: compile the wrapper itself, so that the partitioner reads the recompute tags."""


class CheckpointWrapper(Nameless, TorchCheckpointWrapper):
    """A module whose activations are replayed in backward. Subclass of PyTorch's wrapper, so tools recognise it.

    Parameter, buffer, module and state-dict names are those of the bare module: the wrapper adds no name of its own.
    Attributes of the bare module are read and set through it.

    >>> wrapped = CheckpointWrapper(nn.Linear(2, 3))
    >>> [name for name, _ in nn.Sequential(wrapped).named_parameters()], wrapped.out_features
    (['0.weight', '0.bias'], 3)
    """

    # On the class, so that they are the wrapper's own where the module inside has attributes of the same names.
    policy: Policy = FullPolicy()
    region_name: str = ""
    use_reentrant: bool = False
    preserve_rng_state: bool = True
    early_stop: bool | None = None
    transfer: Transfer | None = None

    def __init__(
        self,
        module: nn.Module,
        use_reentrant: bool = False,
        preserve_rng_state: bool = True,
        *,
        policy: Policy | None = None,
        name: str = "",
        early_stop: bool | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        """Wrap `module`.

        Args:
            module: what is replayed as one region.
            use_reentrant: the older autograd-function form (eager, positional arguments, nothing kept).
            preserve_rng_state: replay with the forward's random numbers.
            policy: what is kept inside the region; None keeps nothing.
            name: the module's name, for error messages; default: its class name.
            early_stop: end the replay at the last tensor that backward needs; None: what `set_early_stop` says.
            transfer: how outputs with the decision HOST move; None: synchronous copies.

        Raises:
            TypeError: `module` is no module, or already such a wrapper.
            ValueError: `use_reentrant` together with a policy that keeps something.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"CheckpointWrapper wraps a torch.nn.Module, not {module!r}, a {type(module).__name__}.")
        if isinstance(module, TorchCheckpointWrapper):
            raise TypeError(
                f"{name or 'The module'} is already checkpointed: wrapping it twice would replay it twice. "
                "Apply checkpointing once, or pass unwrap_checkpoint_wrapper(module)."
            )
        policy = FullPolicy() if policy is None else policy
        if use_reentrant and not isinstance(policy, FullPolicy):
            raise ValueError(
                f"use_reentrant=True keeps nothing inside a region, so it cannot follow {type(policy).__name__}; "
                "use use_reentrant=False."
            )
        super().__init__(module)
        self.policy = policy
        self.region_name = name or type(module).__name__
        self.use_reentrant = use_reentrant
        self.preserve_rng_state = preserve_rng_state
        self.early_stop = early_stop
        self.transfer = transfer
        self._cache_positions = cache_positions(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, as one region where gradients are on."""
        if not torch.is_grad_enabled():
            return self._checkpoint_wrapped_module(*args, **kwargs)
        self._refuse_cache(args, kwargs)
        if self.use_reentrant:
            return self._forward_reentrant(args, kwargs)
        return run_region(
            self._checkpoint_wrapped_module,
            args,
            kwargs,
            policy=self.policy,
            name=self.region_name,
            preserve_rng_state=self.preserve_rng_state,
            transfer=self.transfer,
            early_stop=self.early_stop,
        )

    def _refuse_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [name for name in CACHE_ARGUMENTS if kwargs.get(name) is not None]
        given += [name for at, name in self._cache_positions.items() if at < len(args) and args[at] is not None]
        if given:
            raise RuntimeError(
                f"{self.region_name} was called with {given[0]}= while gradients are on: its replay would write "
                "that cache a second time. Call the model with use_cache=False in training, or under torch.no_grad()."
            )

    def _forward_reentrant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            raise RuntimeError("use_reentrant=True cannot be compiled; use use_reentrant=False.")
        if any(isinstance(value, torch.Tensor) for value in kwargs.values()):
            tensors = [key for key, value in kwargs.items() if isinstance(value, torch.Tensor)]
            raise TypeError(
                f"{self.region_name} was called with tensors by keyword ({', '.join(tensors)}), whose gradients "
                "use_reentrant=True loses; use use_reentrant=False."
            )
        takes_gradients = any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)
        if not takes_gradients and any(p.requires_grad for p in self._checkpoint_wrapped_module.parameters()):
            raise RuntimeError(
                f"{self.region_name} has weights to train and no input that requires a gradient, as behind a frozen "
                "embedding: use_reentrant=True would leave them without gradients. Use use_reentrant=False."
            )
        return torch.utils.checkpoint.checkpoint(
            lambda *positional: self._checkpoint_wrapped_module(*positional, **kwargs),
            *args,
            use_reentrant=True,
            preserve_rng_state=self.preserve_rng_state,
        )


def unwrap_checkpoint_wrapper(module: nn.Module) -> nn.Module:
    """The module inside a checkpoint wrapper (ours or PyTorch's), or `module` itself."""
    return wrapped_module(module) if isinstance(module, TorchCheckpointWrapper) else module


def is_selective_activation_checkpointing(value: object) -> bool:
    """True only for the string ``"selective"``, whatever its case, hyphens or outer blanks."""
    return isinstance(value, str) and normalise(value) == "selective"


def checkpoint_layers(
    model: nn.Module, layers: MutableSequence[nn.Module], make_wrapper: Callable[[nn.Module, str], CheckpointWrapper]
) -> None:
    """Put ``make_wrapper(layer, name)`` in each layer's place, in `model` and in the list `layers`.

    A layer that stands in several places (a looped block) gets one wrapper in all of them.

    Raises:
        ValueError: an entry of `layers` is no registered sub-module of `model`. Nothing has been changed then.
        TypeError: an entry is already checkpointed. Nothing has been changed then.
    """
    slots = _slots_of(model)
    for index, layer in enumerate(layers):
        if layer is model or layer not in slots:
            raise ValueError(
                f"layers[{index}], a {type(layer).__name__}, is not a sub-module of the {type(model).__name__}: "
                "pass modules that the model itself calls."
            )
    wrappers = {layer: make_wrapper(layer, slots[layer][0][2]) for layer in layers}  # raises before the first change
    for layer, wrapper in wrappers.items():
        for parent, child_name, _ in slots[layer]:
            # The registered child itself, not `setattr`: a property of the same name may alias it.
            parent._modules[child_name] = wrapper
    for index, layer in enumerate(layers):
        layers[index] = wrappers[layer]


def _slots_of(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str, str]]]:
    """For each sub-module: every (parent, child name, full name) under which it is registered."""
    slots: dict[nn.Module, list[tuple[nn.Module, str, str]]] = {}
    for parent_name, parent in model.named_modules():
        if isinstance(parent, TorchCheckpointWrapper):
            continue  # the module inside is reached through the wrapper's own slot
        for child_name, child in parent._modules.items():
            if child is not None:
                slots.setdefault(child, []).append((parent, child_name, f"{parent_name}.{child_name}".lstrip(".")))
    return slots


def apply_full_layer_checkpointing_to_layers(model: nn.Module, layers: MutableSequence[nn.Module]) -> None:
    """Replay whole layers and keep nothing but their inputs. `layers` is changed in place to the wrappers.

    Raises:
        ValueError: a layer is not in `model`. TypeError: a layer is already checkpointed. Both change nothing.
    """
    checkpoint_layers(model, layers, lambda layer, name: CheckpointWrapper(layer, name=name))


def apply_selective_checkpointing_to_layers(
    model: nn.Module,
    layers: MutableSequence[nn.Module],
    has_kv_sharing: bool,
    enable_compile: bool = False,
    *,
    policy: Policy | None = None,
    preserve_rng_state: bool = True,
) -> None:
    """Replay whole layers and keep what `policy` says (default: `SelectivePolicy()`).

    Args:
        model: the model that holds the layers; changed in place.
        layers: changed in place, so that a caller who keeps the list sees the wrappers.
        has_kv_sharing: layers share keys and values through the cache: fall back to sub-modules, with a warning.
        enable_compile: the layers will be compiled; prepares Dynamo for several microbatches.
        policy: what each region keeps.
        preserve_rng_state: replay with the forward's random numbers.

    Raises:
        ValueError: a layer is not in `model`. TypeError: a layer is already checkpointed. Both change nothing.
    """
    if has_kv_sharing:
        warn_once(
            "Selective activation checkpointing was asked for, but this model's layers share keys and values through "
            "the cache, which a replayed attention would write twice: checkpointing MLPs and norms only."
        )
        apply_submodule_checkpointing(layers, has_kv_sharing)
        return
    policy = SelectivePolicy() if policy is None else policy
    checkpoint_layers(
        model,
        layers,
        lambda layer, name: CheckpointWrapper(layer, preserve_rng_state=preserve_rng_state, policy=policy, name=name),
    )
    for layer in layers:
        setattr(layer, SELECTIVE_AC_WRAPPER_FLAG, True)
    if enable_compile:
        disable_dynamo_lru_cache()


def apply_submodule_checkpointing(
    layers: Sequence[nn.Module],
    has_kv_sharing: bool,
    *,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
) -> None:
    """Replay each layer's MLP, attention (or linear attention) and norms separately; residual sums stay.

    Args:
        layers: changed inside; the list itself stays.
        has_kv_sharing: skip attention, because replaying it would write the shared cache twice.
        use_reentrant: the older autograd-function form.
        preserve_rng_state: replay with the forward's random numbers.

    Raises:
        ValueError: a layer has no such child. TypeError: a child is already checkpointed. Both change nothing.
    """
    wrappers: list[tuple[nn.Module, str, CheckpointWrapper]] = []
    for layer in dict.fromkeys(layers):
        children = list(_replayable_children(unwrap_checkpoint_wrapper(layer)))
        if not children:
            raise ValueError(
                f"A {type(layer).__name__} has no MLP, attention or norm sub-module to checkpoint; use ac='full' or "
                "'selective', which replay whole layers."
            )
        for parent, name, child in children:
            if not (has_kv_sharing and _is_attention(name, child)):
                title = f"{type(layer).__name__}.{name}"
                wrappers.append((parent, name, CheckpointWrapper(child, use_reentrant, preserve_rng_state, name=title)))
    for parent, name, wrapper in wrappers:
        parent._modules[name] = wrapper


def has_submodules_to_checkpoint(layer: nn.Module) -> bool:
    """Whether `apply_submodule_checkpointing` finds an MLP, attention or norm in `layer`."""
    return next(_replayable_children(unwrap_checkpoint_wrapper(layer)), None) is not None


def _replayable_children(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, child) of a layer's norms, attentions and MLPs, looking into plain lists (T5's ``layer``)."""
    for name, child in layer._modules.items():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _replayable_children(child)
        elif child is not None and _is_replayable(name, child):
            yield layer, name, child


def _is_replayable(name: str, child: nn.Module) -> bool:
    """Norms, attentions and MLPs; not single projections and convolutions, which alone gain nothing from a replay."""
    if not any(True for _ in child.parameters()):
        return False
    return "norm" in type(child).__name__.lower() or _is_attention(name, child) or _is_composite(child)


def _is_attention(name: str, child: nn.Module) -> bool:
    words = f"{name} {type(child).__name__}".lower()
    return "norm" not in words and any(word in words for word in ("attn", "attention", "mixer", "mamba"))


def _is_composite(child: nn.Module) -> bool:
    """Whether it computes with more than one parameter-bearing piece: an MLP or a mixture of experts."""
    return len(list(child.children())) > 0 or len(list(child.parameters(recurse=False))) > 2
