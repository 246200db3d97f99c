"""Checkpointing of modules that the caller holds, by mode: thin surfaces over `apply_specs`."""

from collections.abc import MutableSequence, Sequence
from typing import Any

from torch import nn

from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import bare, bare_modules, check_model
from nemo_like._util.words import a_or_an
from nemo_like.activation_checkpointing.apply import apply_specs, check_specs
from nemo_like.activation_checkpointing.checkpointed import Checkpointed, check_region
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy, SelectivePolicy
from nemo_like.activation_checkpointing.spec import CheckpointSpec, one_region_each, submodules_to_checkpoint
from nemo_like.activation_checkpointing.transfer import Transfer
from nemo_like.options import normalise
from nemo_like.torch_compat import CheckpointWrapper as TorchCheckpointWrapper
from nemo_like.torch_compat import wrapped_module


def is_selective_activation_checkpointing(value: object) -> bool:
    """True only for the string ``"selective"``, whatever its case, hyphens or outer blanks."""
    return isinstance(value, str) and normalise(value) == "selective"


def apply_full_layer_checkpointing_to_layers(model: nn.Module, layers: MutableSequence[nn.Module]) -> None:
    """Recompute whole layers and save nothing but their inputs. The `layers` stay the modules that they are.

    Raises:
        ValueError: a layer is not in `model`.
        TypeError: a layer is already checkpointed. Both change nothing.
    """
    apply_specs(model, one_region_each(dict.fromkeys(names_in(model, layers))), without_cache=False)


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
        layers: modules of it; the list stays as it is.
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
    specs = one_region_each(
        dict.fromkeys(names_in(model, layers)),
        policy=SelectivePolicy() if policy is None else policy,
        preserve_rng_state=preserve_rng_state,
    )
    apply_specs(model, specs, compile=enable_compile, without_cache=False)


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
    names = {module: name for name, module in bare_modules(model) if name}
    for index, layer in enumerate(layers):
        if bare(layer) not in names:
            raise ValueError(
                f"layers[{index}], {a_or_an(layer)}, is not a sub-module of the {type(model).__name__}: "
                "pass modules that the model itself calls."
            )
    return [names[bare(layer)] for layer in layers]


class CheckpointWrapper(TorchCheckpointWrapper):
    """A wrapper around a module whose activations are recomputed, for callers who make one. Subclass of PyTorch's.

    Names of parameters and state dicts are those of the module, which stays as it is: the region is the wrapper's call.

    >>> wrapped = CheckpointWrapper(nn.Linear(2, 3))
    >>> [name for name, _ in wrapped.named_parameters()], wrapped.out_features
    (['weight', 'bias'], 3)
    """

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
        """Wrap `module`; for the arguments see `Checkpointed`, for the errors `check_region`."""
        check_region(module, FullPolicy() if policy is None else policy, use_reentrant, name)
        super().__init__(module)
        Checkpointed(
            self,
            policy,
            name=name or type(module).__name__,
            use_reentrant=use_reentrant,
            preserve_rng_state=preserve_rng_state,
            early_stop=early_stop,
            transfer=transfer,
        ).put()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self._checkpoint_wrapped_module(*args, **kwargs)


def unwrap_checkpoint_wrapper(module: nn.Module) -> nn.Module:
    """Return the module inside a checkpoint wrapper (ours or PyTorch's), or `module` itself."""
    return wrapped_module(module) if isinstance(module, TorchCheckpointWrapper) else module
