"""Check, before the first change, that all ranks ask for the same thing on the same model. Check also that ranks that
share batches are called with the same one.

A rank that shards with other options than its neighbour waits in another collective than its neighbour does. The job
hangs, or gloo aborts it, and nothing names the option. Ranks of ``tp``, ``cp`` and ``pp`` with batches of their
own hang as well, or train on a mixture. So ranks compare first: one number per rank, and the options or arguments
themselves only where the numbers differ.
"""

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import base_model
from nemo_like._util.table import grouped
from nemo_like._util.tensors import bytes_of
from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.distributed import launch
from nemo_like.distributed.mesh import axis_size
from nemo_like.job import Job
from nemo_like.options import Single
from nemo_like.torch_compat import is_fake

_LONGEST = 200  # Characters of a value in a message; longer ones are compared in full and shown cut.
_CALL = "the call"  # Word that a rank sends to the others in place of its options where it refuses them.


def check_agreement(
    model: nn.Module, job: Job | Exception, mesh: DeviceMesh | None = None, device: object = None
) -> None:
    """Raise where ranks were given different jobs or models. A collective, before anything is changed.

    Args:
        model: compared by its parameters' and buffers' names, dtypes, shapes, and whether they train or are meta.
        job: the job of `parallelize` on this rank, or its error: the other ranks hear of it.
        device: of a call that is refused, as the caller wrote it: decides which process group is made.
        mesh: its ranks compare; default: all. With one rank, and for ``strategy="single"``, none does.

    Raises:
        ValueError: on every rank, naming the option or tensor and the ranks.
    """
    alone = isinstance(job, Job) and isinstance(job.strategy, Single)
    if not isinstance(model, nn.Module) or alone or launch.world_size() == 1:
        return
    if isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is None:
        return  # a mesh without this rank: refused in a moment, here and where it is one of too few
    named = job.device if isinstance(job, Job) else device
    try:
        kind = None if named is None else torch.device(named).type  # type: ignore[call-overload]
    except (RuntimeError, TypeError):  # nonsense, which is why the call is refused
        kind = None
    seconds = getattr(job.strategy, "timeout_seconds", None) if isinstance(job, Job) else None
    if not dist.is_initialized():
        launch.init_distributed(kind, timeout=None if seconds is None else timedelta(seconds=seconds))
    elif seconds is not None:
        warn_once(
            f"{job.strategy} sets a timeout; the process group was made before, and keeps "  # type: ignore[union-attr]
            "its own. Give it to nemo_like.distributed.init_distributed(timeout=...), or to init_process_group."
        )
    groups = mesh_groups(mesh if isinstance(mesh, DeviceMesh) else None)
    names = {module: name for name, module in model.named_modules()}
    if isinstance(job, Job):
        options = {name: _words_of(value, code, names) for name, value, code in job.as_words()}
        options |= {"device": repr(kind), "mesh": _describe(mesh, names)}  # each rank has a device number of its own
    else:
        options = {_CALL: f"refused ({job})"}
    layout = {name: _describe_tensor(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    agree((dict(sorted(options.items())), layout), groups, _difference)


def check_same_batch(batch: Mapping[str, Any], groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Raise where ranks that share batches were given different ones. A collective.

    Args:
        batch: a model's arguments, by name. Contents of tensors are compared bitwise; those of `DTensor`,
            which are this rank's own, are not.
        groups: by the name of an axis, the ranks along it that must be given the same.

    Raises:
        ValueError: on every rank, naming the arguments and the ranks.
    """
    mine = {name: _describe(value, {}, contents=True) for name, value in batch.items() if value is not None}
    agree(
        dict(sorted(mine.items())),
        groups.values(),
        lambda everyone: ValueError(
            f"Ranks along {' and '.join(groups)} got different batches: {'; '.join(_differences(everyone))}. Ranks that "
            "split sequences (cp), weights (tp) or layers (pp) work on the same whole batch: give the sampler the number "
            "of the data-parallel rank and how many of those there are (the mesh's dp_replicate and dp_shard), not the "
            "job's rank and world size."
        ),
    )


def compare_batches(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Have the first call of `model` compare the batches of ranks that share them: those along ``cp`` and ``tp`` of `mesh`.

    Call it before any other hook is put on the model, so that no rank raises before all have compared.
    """
    groups = sharing_groups(mesh, ("cp", "tp"))
    if not groups:
        return
    names = tuple(inspect.signature(base_model(model).forward).parameters)

    def compare(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        arguments = dict(zip(names, args)) | kwargs | dict(enumerate(args[len(names) :]))
        if any(isinstance(value, Tensor) and (is_fake(value) or value.is_meta) for value in arguments.values()):
            return  # a plan is made
        handle.remove()
        check_same_batch({str(name): value for name, value in arguments.items()}, groups)

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)


@contextmanager
def together(
    groups: Iterable[dist.ProcessGroup | None], elsewhere: Callable[[int, str, str], Exception]
) -> Iterator[None]:
    """Raise on all ranks along `groups` where the block raises on one, so that none waits for it. A collective behind it.

    elsewhere: of the first rank that raised, its error's type and its words, makes the error of a rank that did not.
    """
    failure: Exception | None = None
    words: tuple[str, ...] = ()
    try:
        yield
    except Exception as error:  # noqa: BLE001  (raised below, once the other ranks know)
        failure, words = error, (type(error).__name__, str(error))
    failed = [row for row in gather_objects((launch.rank(), *words), groups) if row[1:]]
    if failed:
        raise failure or elsewhere(*failed[0])


def sharing_groups(mesh: DeviceMesh | None, axes: Iterable[str]) -> dict[str, dist.ProcessGroup]:
    """The process groups of those `axes` that `mesh` has with more than one rank."""
    return {} if mesh is None else {axis: mesh.get_group(axis) for axis in axes if axis_size(mesh, axis) > 1}


def number_of(value: object) -> int:
    """64 bits that differ, in all likelihood, where `value`, made of builtins, does; they fit a torch.int64."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little", signed=True)


def agree(
    value: object, groups: Iterable[dist.ProcessGroup | None], error: Callable[[list[tuple[int, Any]]], Exception]
) -> None:
    """Raise on all ranks along `groups` where `value`, made of builtins, is not the same on all. A collective.

    error: is made of each rank's number and value, which are sent only then.
    """
    groups = list(groups)
    if any(differing([number_of(value)], groups)):
        raise error(gather_objects((launch.rank(), value), groups))


def differing(numbers: list[int], groups: Iterable[dist.ProcessGroup | None]) -> list[bool]:
    """Return of each of `numbers`, 64 bits, whether some rank along `groups` has another one. A collective."""
    rows = gather(torch.tensor(numbers), groups)
    return (rows != rows[0]).any(0).tolist()


def mesh_groups(mesh: DeviceMesh | None) -> list[dist.ProcessGroup | None]:
    """One process group for each axis of `mesh`, outermost first; all ranks of the job where `mesh` is None."""
    return [None] if mesh is None else [mesh.get_group(axis) for axis in range(mesh.ndim)]


def gather(row: Tensor, groups: Iterable[dist.ProcessGroup | None]) -> Tensor:
    """Every rank's `row`, (n,) in a dtype of its own, as (ranks, n) on the CPU: along one group after the other."""
    rows = row[None]
    for group in groups:
        mine = rows.to(wire_device(group))
        # Filled with this rank's own: the `fake` back end, which measures shapes, writes nothing.
        parts = [mine.clone() for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        rows = torch.cat(parts).cpu()
    return rows


def wire_device(group: dist.ProcessGroup | None, preferred: torch.device | None = None) -> torch.device:
    """Return the device on which `group` can send a tensor: `preferred` (the CPU) where its back end can, else the
    GPU."""
    preferred = preferred or torch.device("cpu")
    served = devices_of(group)
    if preferred.type in served:
        return preferred
    return launch.current_device(next((kind for kind in launch.BACKENDS if kind in served), "cpu"))


def devices_of(group: dist.ProcessGroup | None) -> set[str]:
    """The kinds of device that a back end of `group` sends tensors of."""
    return {pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")}


def gather_objects(mine: object, groups: Iterable[dist.ProcessGroup | None]) -> list[Any]:
    """Return every rank's `mine`, gathered along one group after the other, and sorted by its first item."""
    gathered = [mine]
    for group in groups:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, gathered, group=group)
        gathered = [item for part in parts for item in part]
    return sorted(gathered, key=lambda item: item[0])


def _difference(everyone: list[tuple[int, tuple[dict[str, str], dict[str, str]]]]) -> ValueError:
    refused = any(_CALL in options for _, (options, _) in everyone)  # which has no options to compare
    options = _differences(
        [(rank, {k: v for k, v in options.items() if not refused or k == _CALL}) for rank, (options, _) in everyone]
    )
    if options:
        return ValueError(
            f"Ranks were given different options: {'; '.join(options)}. Each collective needs all ranks, so they would "
            "wait for each other: give every rank the same arguments."
        )
    tensors = _differences([(rank, layout) for rank, (_, layout) in everyone])
    if not tensors:  # the same tensors, registered in another order
        return ValueError("Ranks have the same tensors in different orders: build the same model on every rank.")
    more = f"; and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return ValueError(
        f"Ranks have different models: {'; '.join(tensors[:3])}{more}. Build the same model on every rank; where only one "
        "has the weights, build it on the meta device everywhere and load them with nemo_like.distributed.materialize."
    )


def _differences(everyone: list[tuple[int, dict[str, str]]]) -> list[str]:
    names = dict.fromkeys(name for _, values in everyone for name in values)
    words = {name: by_ranks([(rank, values.get(name, "absent")) for rank, values in everyone]) for name in names}
    return [f"{name} is {', '.join(each[:-1])} and {each[-1]}" for name, each in words.items() if len(each) > 1]


def by_ranks(everyone: list[tuple[int, str]]) -> list[str]:
    """Return "this on ranks 0, 1" for each of the words that ranks have, with the first of long ones."""
    ranks_of = grouped((words, rank) for rank, words in everyone)
    cut = {words: words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..." for words in ranks_of}
    return [f"{cut[words]} on {_ranks_in_words(ranks)}" for words, ranks in ranks_of.items()]


def _ranks_in_words(ranks: list[int]) -> str:
    """Return "rank 3" or "ranks 0, 1"."""
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _describe_tensor(tensor: Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        text += ", frozen"
    return f"{text}, on the meta device" if tensor.is_meta else text


def _describe_contents(tensor: Tensor) -> str:
    """With a number of all its bits."""
    if isinstance(tensor, DTensor) or tensor.layout != torch.strided or tensor.is_quantized:
        return f"a {type(tensor).__name__}"
    return f"{_describe_tensor(tensor)} with contents {hashlib.sha256(bytes_of(tensor.cpu())).hexdigest()[:8]}"


def _words_of(value: object, code: str, names: Mapping[nn.Module, str]) -> str:
    """Return `code`, the text that a caller writes for `value`, where it is unique to it, else its contents."""
    told = " at 0x" not in code and " object at " not in code
    return code if told and not isinstance(value, Plan | tuple) else _describe(value, names)


def _describe(value: object, names: Mapping[nn.Module, str], contents: bool = False) -> str:
    """`value` in words that are the same in every process: no addresses, no order that a hash decides.

    names: of modules. contents: of tensors are told apart, too.
    """

    def said(item: object) -> str:
        return _describe(item, names, contents)

    if isinstance(value, nn.Module):
        return names.get(value, type(value).__name__)
    if isinstance(value, Tensor):
        return _describe_contents(value) if contents else _describe_tensor(value)
    if isinstance(value, DeviceMesh):
        return f"a mesh {dict(zip(value.mesh_dim_names or range(value.ndim), value.shape))}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
        return f"{type(value).__name__}({', '.join(f'{k}={said(v)}' for k, v in fields.items())})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{said(k)}: {said(v)}" for k, v in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(said, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(said, value)) + "]"
    text = repr(value)
    if " at 0x" in text or " object at " in text:  # an address means nothing
        name = getattr(value, "__qualname__", None) or type(value).__qualname__
        return f"{getattr(value, '__module__', None) or type(value).__module__}.{name}"
    return text
