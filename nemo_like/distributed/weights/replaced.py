"""Parameters that would train wrongly without a word.

Those that sharding took out of a model, in an optimizer that was built before, or with attributes that choose an
optimizer's group; and those that were frozen when the model was made ready, and whose gradients no rank reduces.
"""

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import bare_name
from nemo_like.distributed.consistency_checks import differing, mesh_groups, wire_device

# By id, the names of replaced parameters; empty again once none of them is referenced.
_replaced: dict[int, str] = {}


# Have the steps of all optimizers call a function first; each function is registered once.
watch_steps = functools.cache(register_optimizer_step_pre_hook)


class Before(NamedTuple):
    """A parameter before it is replaced, which is not kept alive."""

    reference: weakref.ref[nn.Parameter]
    # The attributes that were set on it: ``_no_weight_decay``, ``_optim``, muP's shapes. A class of another library has
    # its own.
    marks: dict[str, Any]


def parameters_of(model: nn.Module) -> dict[str, Before]:
    """The parameters of `model` by their bare names."""
    return {
        bare_name(name): Before(
            weakref.ref(parameter), dict(vars(parameter)) if type(parameter) is nn.Parameter else {}
        )
        for name, parameter in model.named_parameters()
    }


def watch_replaced(before: Mapping[str, Before], model: nn.Module) -> None:
    """Have the step of an optimizer raise that holds a parameter of `before` whose place in `model` another one has.

    The other one gets the marks of the first.
    """
    for name, parameter in model.named_parameters():
        if (known := before.get(bare_name(name))) is None or (old := known.reference()) is parameter:
            continue
        put_marks(parameter, known.marks)
        if old is not None:
            refuse_to_step(old, bare_name(name))
            del old


def put_marks(parameter: Tensor, marks: Mapping[str, Any]) -> None:
    """Set on `parameter` those of `marks` that are not set on it."""
    for name, value in marks.items():
        vars(parameter).setdefault(name, value)


def refuse_to_train(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Have the forward of `model` raise once one of `parameters`, frozen now and not reduced over ranks, is to train."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad and parameter.is_floating_point()]

    def check(module: nn.Module, _args: object) -> None:
        if torch.is_grad_enabled() and any(map(attrgetter("requires_grad"), frozen)):
            name = next(n for n, p in module.named_parameters() if p.requires_grad and any(p is one for one in frozen))
            raise RuntimeError(
                f"{bare_name(name)} was frozen when parallelize() was called, and requires a gradient now, which would not "
                "be averaged over ranks. Use strategy='fsdp2' (FSDP2(frozen_sharding='per_layer') for a frozen encoder), "
                "or let it train when parallelize() is called and freeze it then, with "
                "strategy=DDP(find_unused_parameters=True)."
            )

    if frozen:
        model.register_forward_pre_hook(check)


def refuse_to_step(parameter: nn.Parameter, name: str) -> None:
    """Have the step of an optimizer raise that holds `parameter`, called `name`, which is not the trained one."""
    _replaced[id(parameter)] = name
    weakref.finalize(parameter, _replaced.pop, id(parameter), None).atexit = False
    watch_steps(_refuse_replaced)


def _refuse_replaced(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    if not _replaced:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = [_replaced[id(parameter)] for parameter in parameters if id(parameter) in _replaced]
    if names:
        raise RuntimeError(
            f"This {type(optimizer).__name__} has {len(names)} parameter(s) that parallelize() or materialize() has "
            f"replaced, {names[0]!r} for one: it would train nothing. Build the optimizer after them, and not in or after a "
            "step that was interrupted, of the parameters that the model has then."
        )


# The `state` of each optimizer as the last step found it: `load_state_dict` puts another in its place.
_looked_at: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()


def refuse_whole_moments(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    """Raise where `optimizer`, about to step, was given the state of whole parameters and has shards."""
    if _looked_at.get(optimizer) is optimizer.state:
        return
    entries = ((p, *item) for p, entry in optimizer.state.items() if isinstance(p, DTensor) for item in entry.items())
    for parameter, name, value in entries:
        whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape
        if whole and parameter.to_local().shape != value.shape:
            raise RuntimeError(
                f"load_state_dict gave this {type(optimizer).__name__} a whole {name!r} of {tuple(value.shape)}, and this "
                "rank holds a shard of the parameter. Call nemo_like.distributed.set_optimizer_state(model, optimizer, "
                "state, full=True) on every rank, with the state that get_optimizer_state(..., full=True) gave."
            )
    _looked_at[optimizer] = optimizer.state


# One model on all ranks: compare a checksum of every tensor, and send the first rank's where they differ.
#
# FSDP2 cuts each rank's shard out of that rank's own weights, and never compares: ranks that drew other initial weights
# make one model out of pieces of several, and the replicas of HSDP train as many models as there are replicas.

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def start_from_the_same_weights(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Give every rank the first rank's parameters and buffers, where they differ; logs it once. A collective.

    Tensors on the meta device have no values yet (`materialize` gives every rank the same), and DTensors are another's
    to care for: both are left out.

    Args:
        model: the same names, shapes and dtypes on every rank (`check_agreement`); changed in place.
        mesh: its ranks hold one model together; None: this process alone.
    """
    if mesh is None or mesh.size() == 1:
        return
    named = (*model.named_parameters(), *model.named_buffers())
    tensors = [pair for name, tensor in named for pair in _inner(name, tensor)]
    groups = mesh_groups(mesh)
    others = differing([int(checksum(tensor)) for _, tensor in tensors], groups) if tensors else []
    chosen = list(compress(tensors, others))
    if not chosen:
        return
    first = int(mesh.mesh.flatten()[0])
    warn_once(
        f"Ranks had different initial weights in {len(chosen)} of {len(tensors)} tensors (first: {chosen[0][0]}): every "
        f"rank has those of rank {first} now. Give all ranks one seed, or load the weights on all of them, to save this.",
        key="different initial weights",
    )
    for _, tensor in chosen:
        flat = tensor.detach().reshape(-1).view(torch.uint8)  # bytes: back ends do not know every dtype
        with torch.no_grad():
            tensor.copy_(_of_first(flat, groups, tensor.device).view(tensor.dtype).view(tensor.shape))


def _of_first(values: Tensor, groups: list[dist.ProcessGroup | None], device: torch.device) -> Tensor:
    """The first rank's `values`, (n,), on `device` where its back ends send from there."""
    # Along one axis after the other: the values of the first rank of each group came from the first rank of all before.
    for group in groups:
        values = values.to(wire_device(group, device), copy=True)
        dist.broadcast(values, group=group, group_src=0)
    return values


def _inner(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """`tensor`, if it has values here; a subclass's inner tensors in place of it."""
    if isinstance(tensor, DTensor) or tensor.is_meta:
        return
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) and hasattr(tensor, "__tensor_flatten__"):
        for attribute in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, attribute), Tensor):  # some name objects that are not tensors, too
                yield from _inner(f"{name}.{attribute}", part)
    elif tensor.numel():
        for axis, stride in enumerate(tensor.stride()):
            if stride == 0:  # expanded: one element in many places, which copy_ refuses to write
                tensor = tensor.narrow(axis, 0, 1)
        yield name, tensor


def checksum(tensor: Tensor) -> Tensor:
    """A number, (), out of every bit of `tensor` and its position; exact, so the same bits give it on every machine."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.detach()
    bits = bits.to(torch.int8) if bits.dtype == torch.bool else bits.view(_BITS[bits.element_size()])
    while bits.ndim:
        # Rows first: a sum over the last axis makes no copy of a large weight in int64.
        places = torch.arange(1, bits.shape[-1] + 1, device=bits.device)
        bits = (bits * places).sum(-1) if bits.ndim == 1 else bits.sum(-1, dtype=torch.int64)
    return bits
