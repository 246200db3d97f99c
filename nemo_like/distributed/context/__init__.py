"""Context parallelism: each rank of the ``cp`` axis holds a part of every sequence, and of the parameters.

`check_context_parallel` raises before anything is changed; `apply_context_parallel` installs hooks on the original model:
one pair on the model (labels and loss), one on its stack of layers (inputs), and the attention over the whole sequence.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like._util.module_tree import bare
from nemo_like.distributed.context.attention import AttentionHooks, register, unregistered, with_own_positions
from nemo_like.distributed.context.methods import METHODS
from nemo_like.distributed.context.parts import MARK, CutStack, Parts, StackHooks
from nemo_like.distributed.context.sequence_ops import name_group
from nemo_like.distributed.context.stacks import find_stack
from nemo_like.distributed.context.whole_loss import RootHooks
from nemo_like.layers import Layer
from nemo_like.options import ContextParallel
from nemo_like.transformers_compat import OWN_ATTENTION, absent


def check_context_parallel(
    model: nn.Module, options: ContextParallel, layers: Sequence[Layer] | None = None, call: nn.Module | None = None
) -> CutStack:
    """The stack of `model` that `options` would cut; changes nothing. `call`: as for `apply_context_parallel`.

    Raises:
        ValueError: a model whose sequences cannot be cut, naming the mixing module; a method that does not fit it.
    """
    stack = find_stack(model, layers, call)
    inner = bare(model)
    if getattr(getattr(inner, "config", None), "output_router_logits", False):
        raise ValueError(
            "config.output_router_logits is True: the auxiliary loss of the routers is not a sum over tokens, and a part of "
            "the sequence does not give its part of it. Set it to False, or use cp=1."
        )
    if options.loss_mean == "rows" and stack.module is inner:
        raise ValueError(
            f"ContextParallel.loss_mean is 'rows', which gives whole sequences to the code behind the layers, and "
            f"{type(inner).__name__} has its layers and the code behind them in one module. Put the layers, from "
            "token ids to hidden states, in a module of their own, or write loss_mean='tokens', 'sum' or a function."
        )
    if stack.transformers:
        METHODS[options.method].check(stack, options.size)
    return stack


def apply_context_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    options: ContextParallel,
    layers: Sequence[Layer] | None = None,
    call: nn.Module | None = None,
) -> nn.Module:
    """Have `model` cut whole sequences over the ranks of `mesh`, in place; returns it.

    Call it on the original model, before checkpointing and FSDP. ``model(**batch).loss`` stays the loss of whole sequences,
    the same on every rank; its gradients, averaged over all ranks that shard parameters, are those of the unsplit model.

    Args:
        mesh: the one-dimensional mesh, ``mesh["cp"]``.
        layers: the repeated layers; None: they are found.
        call: a module whose hooks see the model's inputs (a pipeline's stage is called with hidden states);
            None: `model`.

    Raises:
        ValueError: as `check_context_parallel`. The model is unchanged then.
    """
    stack = check_context_parallel(model, options, layers, call)
    parts = Parts(mesh.size(), mesh.get_local_rank(), name_group(mesh.get_group()), METHODS[options.method])
    _install(model, stack, parts, options, call)
    return model


@contextlib.contextmanager
def cut_for_planning(
    model: nn.Module, options: ContextParallel, layers: Sequence[Layer] | None = None, call: nn.Module | None = None
) -> Iterator[Parts]:
    """Within it, `model` runs on fake tensors as rank 0 of `options.size` would: nothing is sent. For planning.

    The other arguments are those of `apply_context_parallel`.

    Rank 0 holds the last chunk of the sequence, whose queries see most keys, and so has the highest peak.
    """
    stack = check_context_parallel(model, options, layers, call)
    parts = Parts(options.size, 0, "", METHODS[options.method], planning=True)
    with _install(model, stack, parts, options, call):
        yield parts


def _install(
    model: nn.Module, stack: CutStack, parts: Parts, options: ContextParallel, call: nn.Module | None
) -> contextlib.ExitStack:
    """Install the hooks of `apply_context_parallel`, for any `parts`; returns the stack whose end undoes it."""
    undo = contextlib.ExitStack()
    called = model if call is None else call
    _hook(called, RootHooks(model, parts, called, options.loss_mean, is_stack=stack.call is called), undo, first=True)
    if not stack.transformers:
        _hook(called, AttentionHooks(parts), undo, named=False)
    _hook(stack.call, StackHooks(stack, parts), undo)
    for module in stack.module.modules():
        setattr(module, MARK, parts)
        undo.callback(vars(module).pop, MARK, None)
        if not stack.transformers and type(module) is nn.Embedding:
            undo.callback(module.register_forward_pre_hook(functools.partial(with_own_positions, parts)).remove)
    if stack.transformers:
        _reroute(stack, undo)
    return undo


def _hook(
    module: nn.Module, hooks: Any, undo: contextlib.ExitStack, *, first: bool = False, named: bool = True
) -> None:
    """Put ``hooks.before`` and ``hooks.after`` on `module`; the latter runs after an exception, too."""
    undo.callback(module.register_forward_pre_hook(hooks.before, with_kwargs=named).remove)
    undo.callback(module.register_forward_hook(hooks.after, always_call=True, prepend=first).remove)


def _reroute(stack: CutStack, undo: contextlib.ExitStack) -> None:
    """Give the configs below `stack` the name of the attention over whole sequences.

    Raises:
        RuntimeError: none has an attribute for it that is known.
    """
    configs = {id(config): config for config in (getattr(m, "config", None) for m in stack.module.modules())}
    known = [config for config in configs.values() if hasattr(config, OWN_ATTENTION)]
    if not known:
        raise absent(f"has no {OWN_ATTENTION} in the configuration of {type(stack.module).__name__}")
    for config in known:
        before = getattr(config, OWN_ATTENTION)
        if (
            before is None or unregistered(before) == before
        ):  # else stages of a pipeline share it, and one was cut before
            setattr(config, OWN_ATTENTION, register(before or "eager"))
            undo.callback(setattr, config, OWN_ATTENTION, before)
