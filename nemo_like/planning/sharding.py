"""Count the bytes of FSDP2's units and of a tensor-parallel share of a model on one rank; share one plan by all ranks.

The bytes follow PyTorch's ``fully_shard`` (torch 2.13):

- Each parameter is sharded on dim 0, padded to a multiple of the shard axis. Where that would be mostly padding, it is
  sharded on another dim (`nemo_like.distributed.units.shard_dim`), unless tensor parallelism has made it a DTensor.
- A unit is gathered into one flat buffer and copied out of it.
- Its gradients are copied into one flat buffer and reduced; one such buffer stays alive until the next unit's.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from nemo_like._util.garbage import rare_collections
from nemo_like._util.live_bytes import storages_of
from nemo_like._util.module_tree import bare
from nemo_like.distributed.expert.split_experts import Experts, expert_shard_dim
from nemo_like.distributed.units import padded_rows, plan_units, shard_dim
from nemo_like.fake.model_copy import scales_of
from nemo_like.options.optimizers import WIDE_EMBEDDINGS, TrainedParameter
from nemo_like.options.parallel import FSDP2, Precision, ranks_between, unit_reshards
from nemo_like.torch_compat import local_part


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one FSDP2 unit on one rank."""

    kind: str  # ``layer`` | ``tail`` | ``embedding`` | ``root`` | ``dtype``.
    shard: int  # Bytes of its parameters as stored on the device.
    # Bytes of its parameters gathered, in the dtype of forward; also of the flat buffer of the gather.
    gathered: int
    # Bytes of the cast copy of its shard that the gather reads; 0 where the shard itself is read.
    gather_input: int
    reduce_input: int
    reduce_output: int
    grad: int  # Bytes of its gradients once reduced, in the dtype of the parameters.
    # Bytes of its gradients before they are reduced, in the dtype of the reduction, as a micro-batch that does not
    # reduce keeps them.
    whole_grad: int
    # Bytes of its parameters that are cut on another dim than 0, gathered: copied once more in each gather.
    copied: int
    # Bytes of the last such parameter's gradient: alive until the unit's gradients are reduced.
    held_in_reduce: int
    # True where this parameter is the last of all with a gradient; else that one's gradient is alive as long, too.
    cut_last: bool
    reshard: bool  # True where it is freed after forward.
    stack: str = ""  # Name of the stack that a layer is in. Layers of one stack gather each other ahead.
    # Bytes of its shard in the dtype of forward: as many as are gathered where one rank holds all of it.
    shard_gathered: int = 0
    each_shard: tuple[int, ...] = ()  # `shard` by parameter.
    each_gathered: tuple[int, ...] = ()  # `gathered` by parameter.
    # Bytes that a rank keeps of each gathered parameter between forward and backward, where fewer ranks share them
    # then.
    each_kept: tuple[int, ...] = ()
    host_shard: int = 0  # Bytes of its parameters, where they are stored in CPU memory instead.
    # Bytes of its gradients once reduced, where they go to CPU memory: not in `grad` then.
    host_grad: int = 0
    trained: tuple[TrainedParameter, ...] = ()  # This rank's share of each of its parameters that train.

    @property
    def flat(self) -> int:
        """Bytes of the buffer that it is gathered into and copied out of.

        0 where one rank stores all of it: FSDP2 sends nothing then, and copies parameter by parameter without a buffer.
        """
        return 0 if self.gathered == self.shard_gathered else self.gathered


@dataclass(frozen=True)
class Sharding:
    """State of a model on one rank."""

    units: tuple[UnitBytes, ...]  # Units of the layers, each once.
    modules: tuple[str, ...]  # Name of the layer of each of `units`.
    tail: UnitBytes | None
    embedding: UnitBytes | None  # The token embedding, where it is a unit of its own.
    root: UnitBytes
    replicated: int  # Bytes of the parameters that every rank stores whole.
    world: int  # Number of ranks that parameters are sharded over.
    prefetch: tuple[int, int]  # Numbers of units fetched ahead in forward and in backward.
    tail_names: frozenset[str]
    embedding_names: frozenset[str] = frozenset()
    # True where its collectives are gloo's, which copies the buffer that it gathers into and the gradients it reduces.
    gloo: bool = False
    padding: int = 0  # Bytes of `params` that no parameter uses, because the ranks do not divide it.
    # Unit of the experts inside a layer, where these are split, by the layer's name.
    experts: Mapping[str, UnitBytes] = field(default_factory=dict)
    # True where FSDP2 is there for one rank too, as with tensor parallelism: it gathers and reduces all the same.
    alone: bool = False
    # This rank's share of each parameter that trains, in the order of ``model.parameters()``; of those that are on
    # the device.
    trained: tuple[TrainedParameter, ...] = ()
    # Shares that are in CPU memory, with their gradients and optimizer state.
    trained_on_host: tuple[TrainedParameter, ...] = ()

    replicas: int = 1  # Number of ranks with the same shards, over which FSDP2 sums their gradients.
    one_stack: bool = True  # True where all layers are in one stack, whose last layer gathers the tail ahead.

    def fetched_ahead(self, call: int, units: Sequence[UnitBytes | None]) -> list[int]:
        """Return the layer calls whose units are gathered ahead when `call` begins its forward; ``len(units)``: the tail.

        Args:
            call: its number; -1: the root.
            units: of each layer call; None: it belongs to the root.
        """
        ahead = self._of_its_stack(call, range(call + 1, len(units)), units, self.prefetch[0])
        return [*ahead, len(units)] if self.one_stack and len(ahead) < self.prefetch[0] else ahead

    def fetched_behind(self, call: int, units: Sequence[UnitBytes | None], count: int) -> list[int]:
        """Return the layer calls whose units are gathered ahead when `call` begins its backward, at most `count`.

        ``len(units)`` as `call` is the tail, or the root. The first of a stack gathers none of its own: FSDP2 takes the
        unit that ran before it.
        """
        before = range(call - 1, -1, -1)
        return self._of_its_stack(call, before, units, count) or [j for j in before if units[j] is not None][:1]

    def _of_its_stack(
        self, call: int, others: Iterable[int], units: Sequence[UnitBytes | None], count: int
    ) -> list[int]:
        of_call = units[call] if 0 <= call < len(units) else None
        if of_call is None and not self.one_stack:
            return []
        alike = (
            j for j in others if (unit := units[j]) is not None and (of_call is None or unit.stack == of_call.stack)
        )
        return list(itertools.islice(alike, count))

    @property
    def on(self) -> bool:
        """True where FSDP2 gathers and reduces."""
        return self.world > 1 or self.alone

    @property
    def all(self) -> tuple[UnitBytes, ...]:
        """All units, each once."""
        return (*self.units, *self.experts.values(), *self.outside)

    @property
    def outside(self) -> tuple[UnitBytes, ...]:
        """Units that are not of layers."""
        return tuple(unit for unit in (self.tail, self.embedding, self.root) if unit is not None)

    @property
    def params(self) -> int:
        """Parameter bytes on this rank."""
        return sum(unit.shard for unit in self.all) + self.replicated


class ParameterForms:
    """A model's parameters by the facts that decide their bytes on any number of ranks: thousands have a dozen forms.

    Args:
        model, layers: the model whose they are, and its layers.
        whole: one rank has all of the model, which then may have trainable scalars (CLIP's temperature): only FSDP refuses
            them.
        trained: names of the parameters that get a gradient; None: all that require one.
        experts: those of one rank, whose weights are units of their own.
        ends: of `nemo_like.options.FSDP2`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Any],
        *,
        whole: bool,
        trained: frozenset[str] | None = None,
        experts: Sequence[Experts] = (),
        ends: str = "apart",
    ) -> None:
        scalars = [p for p in model.parameters() if p.dim() == 0] if whole else []
        apart = [p for expert in experts for p in expert.weights]
        plan = plan_units(model, layers, ends=ends, ignored_params=scalars, apart=apart)
        named = dict(model.named_parameters(remove_duplicate=False))
        self.plan = plan
        # Ids of the parameters that get a gradient; None: of all that require one.
        self.trained = None if trained is None else frozenset(id(named[name]) for name in trained)
        names = {module: name for name, module in model.named_modules(remove_duplicate=False)}
        self.names = tuple(names[bare(source.modules[0])] for source in plan.layers)
        by_parameter = {id(p): name for name, p in named.items()}
        self.tail_names = frozenset(by_parameter[id(p)] for p in (plan.tail.params if plan.tail else ()))
        self.embedding_names = frozenset(by_parameter[id(p)] for p in (plan.embedding.params if plan.embedding else ()))
        scales = [t for p in model.parameters() for t in scales_of(p)]
        # Bytes of the scales of weights in 4 bits. They are not parameters, so that FSDP2 does not shard them.
        self.scales = sum(storage.nbytes() for storage in dict.fromkeys(storages_of(scales)))
        self._forms: dict[Any, int] = {}
        self._of: dict[int, int] = {}
        self.first: list[nn.Parameter] = []  # The first parameter of each form, by the form's number.
        expert_ids = {id(weight) for expert in experts for weight in expert.weights}
        in_layers = {id(p) for layer in layers for p in layer.inner.parameters()}
        embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding) and hasattr(model, WIDE_EMBEDDINGS))
        wide = {id(embedding.weight) for embedding in embeddings}
        # Parameters that train, in the order of ``model.parameters()``: form, whether in a layer, whether an
        # expert's, whether its 8-bit states are wide.
        self.trains: list[tuple[int, bool, bool, bool]] = [
            (self.form(p), id(p) in in_layers, id(p) in expert_ids, id(p) in wide)
            for p in model.parameters()
            if self.trains_in_step(p)
        ]
        # The forms of each of the plan's units, by its id.
        self.units = {id(unit): tuple(map(self.form, unit.params)) for unit in (*plan.units, *plan.by_dtype)}
        # Number of parameters of each form in the plan's units.
        self.sharded = Counter(form for unit in plan.units for form in self.units[id(unit)])
        # Forms of the weights of experts inside, by name of the layer.
        self.experts: dict[str, tuple[int, ...]] = {}
        for name, source in zip(self.names, plan.layers if experts else ()):
            inside = set(bare(source.modules[0]).modules())
            weights = [weight for expert in experts if expert.module in inside for weight in expert.weights]
            if weights:
                self.experts[name] = tuple(map(self.form, weights))

    def content(self) -> Hashable:
        """Return a key of these parameters: equal where all bytes are."""
        sizes = tuple(self._forms), tuple(self.units.values()), tuple(self.trains), tuple(self.experts.items())
        return sizes, self.names, self.tail_names, self.embedding_names, self.scales

    def trains_in_step(self, param: nn.Parameter) -> bool:
        """Return whether a parameter gets a gradient in a step."""
        return param.requires_grad and (self.trained is None or id(param) in self.trained)

    def form(self, param: nn.Parameter) -> int:
        """Return the number of a parameter's form."""
        entry = self._of.get(id(param))
        if entry is None:
            trains = self.trains_in_step(param)
            key = (getattr(param, "placements", None), local_part(param).shape, param.dtype, trains)
            entry = self._of[id(param)] = self._forms.setdefault(key, len(self._forms))
            if entry == len(self.first):
                self.first.append(param)
        return entry


def sharding_of(
    forms: ParameterForms,
    *,
    shard_ranks: int,
    precision: Precision,
    fsdp: FSDP2,
    expert_ranks: int = 1,
    gloo: bool = False,
    alone: bool = False,
    host: bool = False,
    replicas: int = 1,
) -> Sharding:
    """Return the units that `nemo_like.distributed.shard.shard_layers` would make, in bytes on one of `shard_ranks` ranks.

    Args:
        forms: the parameters.
        shard_ranks: ranks that share them.
        precision, fsdp: dtypes, and FSDP2's options.
        expert_ranks: ranks that share the weights of experts that are units of their own.
        gloo: gloo does the collectives.
        alone: FSDP2 is there, whatever the number of ranks.
        host: shards, gradients and optimizer state are in CPU memory, which the device does not share.
        replicas: ranks with the same shards.
    """
    plan = forms.plan
    last = plan.layers[-1] if plan.layers else None
    dtypes, between = precision.dtypes, ranks_between(fsdp)  # torch cuts on dim 0 only to reshard between

    def cut_dim(param: nn.Parameter, ranks: int, kind: str) -> int:
        """Return the dim that FSDP2 cuts `param` on, in a unit of this kind."""
        if kind == "experts":
            return expert_shard_dim(param, ranks)
        return 0 if between else shard_dim(param, ranks)

    @functools.cache
    def unit_bytes(
        kind: str, of: tuple[int, ...], ranks: int, reshard: bool, stack: str = "", kept: int = 0
    ) -> UnitBytes:
        """Return the bytes of a unit. Equal layers have equal units: one of each is counted."""
        params = [forms.first[form] for form in of]
        dims = [cut_dim(param, ranks, kind) for param in params]
        unit = _unit(kind, params, dims, ranks, dtypes["param_dtype"], dtypes["reduce_dtype"], reshard, forms, host)
        each_kept = tuple(size // kept for size in unit.each_gathered) if kept else ()
        return replace(unit, stack=stack, each_kept=each_kept)

    def unit(source: Any) -> UnitBytes:
        reshard = unit_reshards(fsdp, source.kind, is_last=source is last)
        kept = between if source.kind == "layer" and source is not last else 0
        return unit_bytes(source.kind, forms.units[id(source)], shard_ranks, bool(reshard), source.stack, kept)

    @functools.cache
    def trains_as(form: int, in_layer: bool, of_expert: bool, wide: bool) -> TrainedParameter:
        param, ranks = forms.first[form], expert_ranks if of_expert else shard_ranks
        elements = _padded(param, ranks, cut_dim(param, ranks, "experts" if of_expert else "")) // ranks
        return TrainedParameter(tuple(local_part(param).shape), elements, param.element_size(), in_layer, wide)

    reshard = bool(unit_reshards(fsdp, "experts"))
    inner = {layer: unit_bytes("experts", of, expert_ranks, reshard) for layer, of in forms.experts.items()}
    trains = tuple(trains_as(*each) for each in forms.trains)
    padding = 0
    for form, count in forms.sharded.items():
        param = forms.first[form]
        whole = _padded(param, shard_ranks, cut_dim(param, shard_ranks, ""))
        padding += count * (whole - local_part(param).numel()) * param.element_size()
    root = unit(plan.root)
    for extra in plan.by_dtype:
        root = joined(root, unit(extra))
    return Sharding(
        units=tuple(unit(source) for source in plan.layers),
        modules=forms.names,
        tail=unit(plan.tail) if plan.tail else None,
        embedding=unit(plan.embedding) if plan.embedding else None,
        root=root,
        replicated=sum(local_part(p).nbytes for p in plan.replicated) + forms.scales,
        experts=inner,
        world=shard_ranks,
        gloo=gloo,
        alone=alone,
        replicas=replicas,
        # Where no option sets the units to fetch, FSDP2 itself fetches one ahead in backward.
        prefetch=(fsdp.forward_prefetch, max(1, fsdp.backward_prefetch)),
        tail_names=forms.tail_names,
        embedding_names=forms.embedding_names,
        padding=padding // shard_ranks,
        trained=() if host else trains,
        trained_on_host=trains if host else (),
        one_stack=len({source.stack for source in plan.layers}) == 1,
    )


def _unit(
    kind: str,
    params: Sequence[nn.Parameter],
    dims: Sequence[int],
    ranks: int,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    reshard: bool,
    forms: ParameterForms,
    host: bool,
) -> UnitBytes:
    shards = [(_padded(p, ranks, dim) // ranks, p) for p, dim in zip(params, dims)]
    trained = [(n, p) for n, p in shards if forms.trains_in_step(p)]
    compute = [(n, (param_dtype or p.dtype).itemsize) for n, p in shards]
    reduce = [(n, (reduce_dtype or param_dtype or p.dtype).itemsize) for n, p in trained]
    cut = [p for p, dim in zip(params, dims) if dim]
    stored = [n * p.element_size() for n, p in shards]
    grads = sum(n * p.element_size() for n, p in trained)
    casts = param_dtype is not None and any(p.dtype != param_dtype for p in params)
    return UnitBytes(
        kind=kind,
        shard=0 if host else sum(stored),
        host_shard=sum(stored) if host else 0,
        gathered=sum(n * size for n, size in compute) * ranks,
        # Shards in CPU memory are copied to the device before the gather.
        gather_input=sum(n * size for n, size in compute) if host or casts else 0,
        reduce_input=sum(n * size for n, size in reduce) * ranks,
        reduce_output=sum(n * size for n, size in reduce),
        grad=0 if host else grads,
        host_grad=grads if host else 0,
        copied=sum(local_part(p).numel() * (param_dtype or p.dtype).itemsize for p in cut),
        held_in_reduce=next(
            (local_part(p).numel() * (param_dtype or p.dtype).itemsize for p in reversed(cut) if p.requires_grad), 0
        ),
        cut_last=bool(trained) and any(trained[-1][1] is p for p in cut),
        whole_grad=sum(local_part(p).numel() * (reduce_dtype or param_dtype or p.dtype).itemsize for _, p in trained),
        reshard=reshard,
        shard_gathered=sum(n * size for n, size in compute),
        each_shard=tuple(stored),
        each_gathered=tuple(n * size * ranks for n, size in compute),
        trained=tuple(
            TrainedParameter(tuple(local_part(p).shape), n, p.element_size(), kind in ("layer", "experts"))
            for n, p in trained
        ),
    )


def joined(a: UnitBytes, b: UnitBytes) -> UnitBytes:
    """Return both as one unit, of the kind of the first."""
    sums = {k: getattr(a, k) + getattr(b, k) for k in vars(a) if k not in ("kind", "reshard", "stack", "cut_last")}
    return replace(a, cut_last=(b if b.reduce_input else a).cut_last, **sums)


def _padded(param: torch.Tensor, ranks: int, dim: int) -> int:
    """Return the elements over all ranks that share this rank's part of it, with padding."""
    part = local_part(param)
    if part.dim() == 0:
        return part.numel() * ranks
    return part.numel() if dim else padded_rows(part, ranks) * math.prod(part.shape[1:])


T = TypeVar("T")


@rare_collections()
def same_on_all_ranks(make: Callable[[], T]) -> T:
    """Call `make` on rank 0, and return its result, or raise its error, on all ranks.

    Of ranks that are not there (back end ``fake``), each calls it. Python looks for garbage rarely meanwhile.

    >>> import gc
    >>> same_on_all_ranks(gc.get_threshold) > gc.get_threshold()
    True
    """
    is_one = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    if is_one or dist.get_backend() == "fake":
        return make()
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [make()]
        except Exception as error:  # noqa: BLE001 - passed on to every rank, where it is raised
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]
