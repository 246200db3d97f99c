"""Context parallelism: each rank of the ``cp`` axis holds a part of every sequence, and of the parameters.

`check` raises before anything is changed; `apply` installs hooks on the bare model: one pair on the model (labels and
loss), one on each stack of layers (inputs), and the attention that gathers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like._util.module_tree import bare
from nemo_like.distributed.context import attention
from nemo_like.distributed.context.attention import (
    AttentionHooks,
    OwnPositions,
    PositionHook,
    counts_along,
    replace_flex,
)
from nemo_like.distributed.context.methods import method_of
from nemo_like.distributed.context.parts import MARK, CutStack, Parts
from nemo_like.distributed.context.sequence_ops import name_group
from nemo_like.distributed.context.stack_calls import (
    LongestPosition,
    StackHooks,
    gather_before,
    gather_behind,
    reads_the_longest,
)
from nemo_like.distributed.context.stacks import (
    count_from_the_whole,
    counts_positions,
    find_stacks,
    over_whole_sequences,
)
from nemo_like.distributed.context.whole_loss import RootHooks
from nemo_like.layers import Layer
from nemo_like.layers.structure import is_callable, is_container
from nemo_like.options import CONTEXT_METHODS, ContextParallel
from nemo_like.transformers_compat import OWN_ATTENTION, absent

__all__ = ["apply_context_parallel", "check_context_parallel"]

_STATES = "encoder_hidden_states"

for _word in CONTEXT_METHODS:
    method_of(_word)  # which defines the operators that it sends with: settings may name them


def check_context_parallel(
    model: nn.Module, options: ContextParallel, layers: Sequence[Layer] | None = None, call: nn.Module | None = None
) -> tuple[CutStack, ...]:
    """The stacks of `model` that `options` would cut; changes nothing. `call`: as for `apply_context_parallel`.

    Raises:
        ValueError: a model whose sequences cannot be cut, naming what mixes along them; a method that does not fit it.
    """
    stacks = find_stacks(model, layers, call)
    config = getattr(bare(model), "config", None)
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "config.output_router_logits is True: the auxiliary loss of the routers is not a sum over tokens, and a part of "
            "the sequence does not give its part of it. Set it to False, or use cp=1."
        )
    method = method_of(options.method)
    for stack in stacks:
        if stack.transformers:
            method.check(stack, options.size)
    return stacks


def apply_context_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    options: ContextParallel,
    layers: Sequence[Layer] | None = None,
    call: nn.Module | None = None,
) -> nn.Module:
    """Have `model` cut whole sequences over the ranks of `mesh`, in place; returns it.

    Call it on the bare model, before checkpointing and FSDP. ``model(**batch).loss`` stays the loss of whole sequences,
    the same on every rank; its gradients, averaged over all ranks that shard parameters, are those of the unsplit model.

    Args:
        mesh: the one-dimensional mesh, ``mesh["cp"]``.
        layers: the repeated layers; None: they are found.
        call: a module whose hooks see what the model is called with (a pipeline's stage is called with hidden states);
            None: `model`.

    Raises:
        ValueError: as `check_context_parallel`. The model is unchanged then.
    """
    stacks = check_context_parallel(model, options, layers, call)
    parts = Parts(mesh.size(), mesh.get_local_rank(), name_group(mesh.get_group()), method_of(options.method))
    install(model, stacks, parts, call)
    return model


@contextlib.contextmanager
def cut_for_planning(
    model: nn.Module, options: ContextParallel, layers: Sequence[Layer] | None = None, call: nn.Module | None = None
) -> Iterator[Parts]:
    """Within it, `model` runs on fake tensors as rank 0 of `options.size` would: nothing is sent. For planning.

    The other arguments are those of `apply_context_parallel`.

    Rank 0 holds the last chunk of the sequence, whose queries see most keys, and so has the highest peak.
    """
    method = method_of(options.method)
    if not method.planned:
        planned = " or ".join(repr(word) for word in CONTEXT_METHODS if method_of(word).planned)
        raise ValueError(
            f"A budget counts with method={planned}; {options.method!r} is not planned: use a mode (ac='full')."
        )
    stacks = check_context_parallel(model, options, layers, call)
    parts = Parts(options.size, 0, "", method, planning=True)
    undo = install(model, stacks, parts, call)
    try:
        yield parts
    finally:
        for take_back in reversed(undo):
            take_back()


def install(model: nn.Module, stacks: Sequence[CutStack], parts: Parts, call: nn.Module | None = None) -> list[Any]:
    """The hooks of `apply_context_parallel`, for any `parts`; returns what undoes it, to be called in reverse."""
    undo: list[Any] = []
    called = model if call is None else call
    plain = [stack for stack in stacks if not stack.transformers]
    root = RootHooks(model, parts, called, is_stack=any(stack.call is called for stack in stacks))
    undo.append(called.register_forward_pre_hook(root.before, with_kwargs=True).remove)
    undo.append(called.register_forward_hook(root.after, always_call=True, prepend=True).remove)
    if plain:
        hooks = AttentionHooks(parts)
        undo.append(called.register_forward_pre_hook(hooks.before).remove)
        undo.append(called.register_forward_hook(hooks.after, always_call=True).remove)
    paired = len(stacks) > 1 and any(_STATES in stack.arguments for stack in stacks)
    for stack in stacks:
        inner = StackHooks(stack, parts, paired)
        undo.append(stack.call.register_forward_pre_hook(inner.before, with_kwargs=True).remove)
        undo.append(stack.call.register_forward_hook(inner.after, always_call=True).remove)
        inside = {module for layer in stack.layers for module in layer.modules()}
        for module in stack.module.modules():
            setattr(module, MARK, parts)
            undo.append(_Delete(module, MARK))
            if stack.transformers:
                undo.extend(over_whole_sequences(module, parts))
                if "position_ids" not in stack.arguments and module not in inside and counts_along(module):
                    table = OwnPositions(module, parts)
                    undo.append(module.register_forward_pre_hook(table.before, with_kwargs=True).remove)
                    undo.append(module.register_forward_hook(table.after, always_call=True).remove)
                if reads_the_longest(module):
                    longest = LongestPosition(module)
                    undo.append(module.register_forward_pre_hook(longest.before, with_kwargs=True).remove)
                    undo.append(module.register_forward_hook(longest.after, always_call=True).remove)
                if counts_positions(module):
                    undo.append(module.register_forward_pre_hook(count_from_the_whole, with_kwargs=True).remove)
            elif type(module) is nn.Embedding:
                undo.append(module.register_forward_pre_hook(PositionHook(parts)).remove)
        for name, module in stack.module.named_children():
            if "pool" in name.lower() and inside.isdisjoint(module.modules()):
                undo.append(module.register_forward_pre_hook(gather_before, with_kwargs=True).remove)
            if inside.issubset(module.modules()) and is_callable(module) and not is_container(module):
                undo.append(module.register_forward_hook(gather_behind).remove)
        if not stack.transformers:
            undo.extend(replace_flex(stack.module))
        elif not stack.cached:
            undo.extend(_reroute(stack, parts))
    return undo


class _Delete:
    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self) -> None:
        if self._name in vars(self._owner):
            delattr(self._owner, self._name)


class _Set:
    def __init__(self, owner: object, name: str, value: object) -> None:
        self._owner, self._name, self._value = owner, name, value

    def __call__(self) -> None:
        setattr(self._owner, self._name, self._value)


def _reroute(stack: CutStack, parts: Parts) -> Iterator[Any]:
    """Give the configs below `stack` the name of the attention that gathers.

    Raises:
        RuntimeError: none has an attribute for it that is known.
    """
    seen: set[int] = set()
    for module in stack.module.modules():
        config = getattr(module, "config", None)
        if config is None or id(config) in seen or not hasattr(config, OWN_ATTENTION):
            continue
        seen.add(id(config))
        before = getattr(config, OWN_ATTENTION)
        if before is not None and attention.unregistered(before) != before:
            continue  # shared with a stack before this one, as an encoder's with its decoder's
        setattr(config, OWN_ATTENTION, attention.register(before or "eager"))
        yield _Set(config, OWN_ATTENTION, before)
    if not seen:
        raise absent(f"has no {OWN_ATTENTION} in the configuration of {type(stack.module).__name__}")
