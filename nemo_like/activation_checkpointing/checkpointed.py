"""Checkpointing of one module: an object in its `forward`, which runs the call as one region."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from nemo_like._util.forwards import Forward, Place, put_back, step_of
from nemo_like._util.module_tree import bare, check_model
from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.activation_checkpointing.engine.compiled import compiled_region, warn_of_eager
from nemo_like.activation_checkpointing.engine.hooks import recomputation
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy
from nemo_like.activation_checkpointing.transfer import Transfer
from nemo_like.torch_compat import CheckpointWrapper as TorchCheckpointWrapper
from nemo_like.transformers_compat import given_cache, parameter_names

SELECTIVE_AC_WRAPPER_FLAG = "_nemo_like_selective_ac"
"""Attribute of a checkpointed layer that keeps something: it is compiled with its region, so that the partitioner reads the
recompute tags."""


class Checkpointed(Forward):
    """A module whose activations are recomputed in backward. Names, classes and hooks of the module stay as they are."""

    place, does = Place.REGION, "checkpointing"

    def __init__(
        self,
        module: nn.Module,
        policy: Policy | None = None,
        *,
        name: str = "",
        use_reentrant: bool = False,
        preserve_rng_state: bool = True,
        early_stop: bool | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        """Prepare; `put` has it in place.

        Args:
            module: the module to recompute as one region.
            policy: chooses the outputs saved inside the region; None saves nothing.
            name: the module's name, for error messages; default: its class name.
            use_reentrant: the older autograd-function form (eager, nothing saved).
            preserve_rng_state: recompute with the forward's random numbers.
            early_stop: end the recomputation at the last tensor that backward needs; None: as `set_early_stop` has set it.
            transfer: how outputs with the decision HOST move; None: synchronous copies.

        `check_region` raises for arguments that do not fit.
        """
        super().__init__(module)
        self.policy = FullPolicy() if policy is None else policy
        self.name = name or type(module).__name__
        self.use_reentrant = use_reentrant
        self.preserve_rng_state = preserve_rng_state
        self.early_stop = early_stop
        self.transfer = transfer
        self._arguments = parameter_names(bare(module).forward)

    @property
    def word(self) -> str:  # type: ignore[override]
        """``full``, or the word of the policy (``selective``, ``planned``); of another's policy its class."""
        policy = getattr(
            self.policy, "policy", self.policy
        )  # of a `HostPolicy`: another one's outputs wait in CPU memory
        return "full" if policy.keeps_nothing else getattr(policy, "word", type(policy).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward as one region, if gradients flow through it."""
        if torch.compiler.is_compiling():
            if not torch.is_grad_enabled():
                return self.call(*args, **kwargs)
            self._refuse_cache(args, kwargs)
            return self._compiled(args, kwargs)
        if not torch.is_grad_enabled() or self._saves_nothing(args, kwargs):
            return self.call(*args, **kwargs)
        self._refuse_cache(args, kwargs)
        return self._forward_reentrant(args, kwargs) if self.use_reentrant else self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward as a region of the eager engine."""
        return run_region(
            self.call,
            args,
            kwargs,
            policy=self.policy,
            name=self.name,
            preserve_rng_state=self.preserve_rng_state,
            transfer=self.transfer,
            early_stop=self.early_stop,
            owner=self.module,
        )

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.use_reentrant:
            raise RuntimeError("use_reentrant=True cannot be compiled; use use_reentrant=False.")
        # The name is read in code that is not traced: Dynamo would make a graph for each layer.
        return compiled_region(self.call, args, kwargs, self.policy, self.preserve_rng_state, self._left_to_eager)

    def _left_to_eager(self, *args: Any, **kwargs: Any) -> Any:
        warn_of_eager(self.name)
        return self.run(*args, **kwargs)

    def _saves_nothing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether no gradient flows through this call: nothing in the module trains, and no input needs a
        gradient.

        Asked at each call, and not once: only then is it known whether something before a frozen layer trains.
        """
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values())):
            return False
        inside = chain(tensors_in((args, kwargs)), self.module.parameters())
        return not any(tensor.requires_grad for tensor in inside)

    def _refuse_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = given_cache(self._arguments, args, kwargs)
        if cache is not None:
            raise RuntimeError(
                f"{self.name} was called with {cache}= while gradients are on: its recomputation would write "
                "that cache a second time. Call the model with use_cache=False in training, or under torch.no_grad(); a "
                "model that makes a cache at every call, and cannot be told not to, cannot recompute its attention."
            )

    def _forward_reentrant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Autograd sees the tensors among the function's own arguments only: those by keyword are passed on as such.
        names = [key for key, value in kwargs.items() if isinstance(value, torch.Tensor)]
        others = {key: value for key, value in kwargs.items() if key not in names}
        positional, count = (*args, *(kwargs[name] for name in names)), len(args)
        inside = tensors_in(([value for value in args if not isinstance(value, torch.Tensor)], others))
        if any(tensor.requires_grad for tensor in inside):
            raise TypeError(
                f"{self.name} was called with a tensor that requires a gradient inside a list, dict or other "
                "container; use_reentrant=True loses such gradients. Use use_reentrant=False."
            )
        takes_gradients = any(isinstance(value, torch.Tensor) and value.requires_grad for value in positional)
        if not takes_gradients and any(p.requires_grad for p in self.module.parameters()):
            raise RuntimeError(
                f"{self.name} has weights to train and no input that requires a gradient, as behind a frozen "
                "embedding: use_reentrant=True would leave them without gradients. Use use_reentrant=False."
            )

        def run(*inputs: object) -> Any:
            with recomputation(torch.is_grad_enabled()):  # gradients are off in forward
                return self.call(*inputs[:count], **dict(zip(names, inputs[count:], strict=True)), **others)

        return torch.utils.checkpoint.checkpoint(
            run, *positional, use_reentrant=True, preserve_rng_state=self.preserve_rng_state
        )


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether calls of `module` are recomputed in backward by this package.

    >>> from nemo_like import apply_activation_checkpointing
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)) for _ in range(2)))
    >>> is_checkpointed(apply_activation_checkpointing(model, "full")[0])
    True
    """
    return step_of(module, Checkpointed) is not None


def regions_in(*modules: nn.Module) -> list[Checkpointed]:
    """Return the regions of `modules` and of all modules in them, each once."""
    inside = dict.fromkeys(inner for module in modules for inner in module.modules())
    return [region for inner in inside if (region := step_of(inner, Checkpointed)) is not None]


def check_region(module: nn.Module, policy: Policy, use_reentrant: bool, name: str) -> None:
    """Raise where `module` cannot be one region.

    Raises:
        TypeError: `module` is not a module, or is checkpointed already.
        ValueError: `use_reentrant` together with a policy that keeps something.
    """
    check_model(module, name or "module")
    if is_checkpointed(module) or isinstance(module, TorchCheckpointWrapper):
        raise TypeError(
            f"{name or 'The module'} is already checkpointed: it would be recomputed twice. Apply checkpointing once."
        )
    if use_reentrant and not isinstance(policy, FullPolicy):
        raise ValueError(
            f"use_reentrant=True keeps nothing inside a region, so it cannot follow {type(policy).__name__}; "
            "use use_reentrant=False."
        )


# No one else recomputes our regions: found at the call that would switch it on, or else at the next forward.
#
# Whoever checkpoints a model after us (a trainer's setting, accelerate's, the model's own) nests one recomputation in
# another: everything is computed twice more, and the outputs that our policy keeps have no effect.

# Names of models' own checkpointing: transformers, timm.
FLAGS = ("gradient_checkpointing", "grad_checkpointing")


def second_replay(where: str, flag: str) -> ValueError:
    """The error for a module that is checkpointed by us and has its own checkpointing switched on."""
    return ValueError(
        f"{where}.{flag} is True, and regions of nemo_like are in the model: it would be recomputed twice. Use one of the "
        "two: leave gradient checkpointing off (model.gradient_checkpointing_disable(), set_grad_checkpointing(False), "
        "in a Trainer gradient_checkpointing=False), or ac='none'."
    )


def watch_for_others(model: nn.Module) -> None:
    """Have `model`, and each module below it that holds a list of regions, look before its forwards."""
    for module in model.modules():
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList | nn.Sequential)]
        holds = module is model or bool(regions_in(*lists))
        if holds and not any(isinstance(hook, _OnlyOurs) for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(hook := _OnlyOurs())
            hook.chains = regions_in(module)


class _OnlyOurs:
    """A forward pre-hook (a class of the module's, so that a model with it can be copied and pickled)."""

    _flagged: list[tuple[nn.Module, str]] | None = None
    chains: Sequence[Forward] = ()

    def __call__(self, module: nn.Module, _args: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if self._flagged is None:  # the first forward: by now, whoever prepares a model has done it
            _refuse_nested(module)
            self._flagged = [(inner, name) for inner in module.modules() for name in FLAGS if hasattr(inner, name)]
        self.chains = [put_back(forward) for forward in self.chains if forward.is_alive]
        for inner, name in self._flagged:
            if inner.training and getattr(inner, name) is True:
                raise second_replay(type(inner).__name__, name)


def _refuse_nested(model: nn.Module) -> None:
    for name, module in model.named_modules():
        wrappers = (inner for inner in module.modules() if isinstance(inner, TorchCheckpointWrapper))
        inside = [wrapper for wrapper in wrappers if not is_checkpointed(wrapper)]
        if (inside and is_checkpointed(module)) or (module in inside and regions_in(module)):
            raise ValueError(
                f"PyTorch's checkpoint_wrapper was put around or into {name or 'the model'} after nemo_like had "
                "checkpointed it (accelerate does that for fsdp_activation_checkpointing: true, and for "
                "FullyShardedDataParallelPlugin(activation_checkpointing=True)): two recomputations nest, and ac= "
                "would have no effect. Switch that off, or use ac='none'."
            )
