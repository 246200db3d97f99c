"""Trace a block op by op without running it: bytes, FLOPs, which op reads which, and the tensors that autograd saves.

`Recorder` watches the ops of a forward pass (fake or real). `trace_block` runs one block under fake tensors and returns
a `BlockTrace`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from nemo_like._util.op_lookup import argument, packet_name
from nemo_like._util.tensors import Place, by_argument, is_wrapped, map_tensors, tensors_in
from nemo_like.activation_checkpointing import ops
from nemo_like.activation_checkpointing.checkpointed import Checkpointed
from nemo_like.activation_checkpointing.names import Hidden, heard_by, operands_of, watch_modules, words_of
from nemo_like.fake.model_copy import with_state
from nemo_like.fake.run import FakeRun, FakeTensor
from nemo_like.torch_compat import DispatchMode, OpOverload, local_part


@dataclass(frozen=True)
class OpRecord:
    """One op of a block's forward pass."""

    op: OpOverload
    nth: int  # Invocation index among the ops of the same overload in the block.
    shapes: tuple[tuple[int, ...], ...]  # Shapes of its output tensors.
    bytes: int  # Bytes of the storages it creates; 0 for a view and an in-place op.
    flops: int
    moved: int  # Bytes its kernel reads and writes.
    reads: tuple[int, ...]  # Indices of the ops that wrote the storages it reads.
    view: bool  # True where it makes no storage and changes none: a view, an alias, a query.
    random: bool
    half: bool  # True where it computes in a 16-bit floating-point type.
    needed: bool = False  # True where autograd saves an output of it, or a view of one.
    changed: bool = False  # True where a later op changes one of its outputs in place.
    # Number of its inputs that need a gradient: a matrix product has one product for each in backward.
    grads: int = 2
    # Indices of the ops that wrote the tensors with the float8 values of its inputs.
    values: tuple[int, ...] = ()
    # Numbers and bytes of the storages that it reads and no op wrote: inputs and parameters.
    outer: tuple[tuple[int, int], ...] = ()
    # True where a later op reads running statistics that it changes: saved or skipped, it would not change them
    # again.
    steers: bool = False
    # Index of an earlier op that computes the same of the same inputs; None: there is none.
    twin: int | None = None
    # Bytes of whole sequences that it gathers besides its kernels, and once more in backward.
    gathered: int = 0
    parts: tuple[int, ...] = ()  # Of `bytes`, those of each storage.
    # Names of its output (`nemo_like.activation_checkpointing.names`).
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockTrace:
    """Facts about one block in one call that planning uses."""

    name: str
    ops: tuple[OpRecord, ...]
    # Bytes of the storages of its own inputs: those that not all blocks share, as they do position tables.
    input_bytes: int
    # Bytes that autograd saves without checkpointing: distinct storages, without parameters, buffers and shared
    # inputs.
    none_bytes: int
    kept_input_bytes: int  # Bytes of its own inputs among `none_bytes`.
    kept_output_bytes: int  # Bytes of its outputs among `none_bytes`.
    # Ops from this index on come after the last tensor that autograd saves: recomputation stops before them.
    last_pack: int
    # Bytes of its buffers that forward changes (running statistics): a region keeps a copy of their values before it.
    state_bytes: int
    draws: bool  # True where an op draws random numbers, so that a region keeps the generator's state.
    # Places in its call of its own inputs that autograd saves without checkpointing.
    kept_inputs: frozenset[Place] = frozenset()
    # Positions of the shared tensors that autograd saves without checkpointing.
    kept_shared: frozenset[int] = frozenset()
    # Calls of the regions inside of it. With them, the block keeps their inputs and the tensors that autograd saves outside.
    regions: tuple[TracedRegion, ...] = ()

    @property
    def saves_something(self) -> bool:
        """True where a gradient flows through the block; else it is never recomputed (`Checkpointed`)."""
        return self.last_pack > 0

    @property
    def flops(self) -> int:
        """FLOPs of one forward pass."""
        return sum(op.flops for op in self.ops)


class TracedRegion(NamedTuple):
    """One call of a region inside of a block."""

    path: str  # Of its module in the block.
    at: int  # Index of its first op among those of the block.
    trace: BlockTrace


# `stored_parts` of each input and of each output.
Stored = tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]


def stored_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return this rank's part of a tensor; of one in torchao's float8 also the tensor that holds its values."""
    local = local_part(tensor)
    if not type(local).__module__.startswith("torchao.float8"):
        return [local]
    return [local, getattr(local, local.__tensor_flatten__()[0][0])]  # type: ignore[attr-defined]


@dataclass
class _Storages:
    """Storages seen so far. They are held until the trace ends, because an id is only good while its object lives."""

    held: list[Any] = field(default_factory=list)
    # ``"param"``, ``"input"`` or ``"shared"`` for storages that existed before.
    origin: dict[int, str] = field(default_factory=dict)
    writers: dict[int, list[int]] = field(default_factory=dict)
    size: dict[int, int] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)

    def key(self, tensor: torch.Tensor) -> int:
        storage = local_part(tensor).untyped_storage()
        if id(storage) not in self.size:
            self.held.append(storage)
            self.size[id(storage)] = storage.nbytes()
        return id(storage)

    def number(self, key: int) -> int:
        """Return a number for a storage, the same in every trace of the same calls."""
        return self.numbers.setdefault(key, len(self.numbers))

    def known(self, tensor: torch.Tensor) -> bool:
        key = self.key(tensor)
        return key in self.origin or key in self.writers


class _Packed:
    """Object that autograd saves in the place of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Recorder(DispatchMode):
    """Recorder of every op that runs inside it; use as a context around a forward pass.

    `declare` names the storages that exist before; whatever else appears as an input counts as a constant.
    """

    def __init__(self, hidden: Hidden | None = None) -> None:
        super().__init__()
        self.hidden = hidden  # Of the block's first input.
        self.ops: list[OpRecord] = []
        self.packs: list[tuple[int, int, weakref.ref[_Packed]]] = []
        self.storages = _Storages()
        self.changed: set[int] = set()  # Keys of the storages that ops changed in place.
        # Index of the op that changed running statistics last, by their key.
        self._statistics: dict[int, int] = {}
        self._count: dict[OpOverload, int] = {}
        self._calls: dict[Any, int] = {}  # Indices of ops by their arguments.
        self._made: dict[int, list[int]] = {}  # Keys of the storages of their results.
        self._same: dict[int, int] = {}  # For the storage of an op that has an equal one, that one's.
        # Keys of the storages of tensors that need a gradient, and of tensors made of them.
        self._trained: set[int] = set()
        self.params: list[torch.Tensor] = []
        self.regions: list[TracedRegion] = []
        self.inputs_of_regions: list[_Packed] = []

    def declare(self, origin: str, tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> None:
        for tensor in tensors:
            self.storages.origin.setdefault(self.storages.key(tensor), origin)
            if tensor.requires_grad:
                self._trained.add(self.storages.key(tensor))

    def pack(self, tensor: torch.Tensor) -> _Packed:
        """Note that autograd saves `tensor`: a saved-tensor hook."""
        packed = _Packed(tensor)
        self.packs.append((len(self.ops), self.storages.key(tensor), weakref.ref(packed)))
        return packed

    def named(self, tensor: torch.Tensor, label: str) -> None:
        """Note a name of the output of the operator that made `tensor`."""
        writers = self.storages.writers.get(self.storages.key(tensor), ())
        maker = next((index for index in writers if self.ops[index].bytes), None)
        if maker is not None and label not in self.ops[maker].names:
            self.ops[maker] = replace(self.ops[maker], names=(*self.ops[maker].names, label))

    def kept(self) -> set[int]:
        """Return the keys of the storages that autograd keeps now.

        Storages kept for tensors that are gone went with them: for example those by which a router chooses its experts.
        """
        return {key for _, key, packed in self.packs if packed() is not None}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        stored = [*map(stored_parts, given)], [*map(stored_parts, tensors_in(result))]
        # An operator of a DTensor is one for the engine, too, which decides on it. Its bytes are those of this rank's part.
        args, kwargs, out = (
            map_tensors(local_part, (args, kwargs, result)) if is_wrapped(types) else (args, kwargs, result)
        )
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(out)
        self._trained |= {self.storages.key(tensor) for tensor in given if tensor.requires_grad}
        for tensor in inputs:
            if not self.storages.known(tensor):
                self.storages.origin[self.storages.key(tensor)] = "constant"
        if not outputs and not ops.written_tensors(func, args, kwargs):
            return result  # a question (a device, a value), not an op
        self._record(func, args, kwargs, inputs, out, outputs, stored)
        return result

    def _record(
        self, func: OpOverload, args: tuple, kwargs: dict, inputs: list, out: Any, outputs: list, stored: Stored
    ) -> None:
        s, index = self.storages, len(self.ops)
        nth = self._count.get(func, 0)
        self._count[func] = nth + 1
        read = dict.fromkeys(s.key(t) for t in inputs)
        values = {s.key(part) for parts in stored[0] for part in parts[1:]}
        new = dict.fromkeys(s.key(t) for t in outputs if not s.known(t))
        # A wrapper of other tensors has no bytes, so none is kept: torchao's `detach` loses its scale's origin.
        parts = () if is_wrapped(map(type, outputs)) else tuple(s.size[key] for key in new)
        changed = set() if func is _SET else {s.key(t) for t in ops.written_tensors(func, args, kwargs)}
        statistics = {s.key(t) for t in _statistics(func, args, kwargs)}
        self.changed |= changed | statistics
        reads = sorted({w for key in read for w in s.writers.get(key, ())})
        writes = sorted({w for key in changed for w in s.writers.get(key, ())})
        view = not new and not changed
        # Inside of a function that brings its own backward, no tensor is marked.
        grads = sum(bool({s.key(part) for part in parts} & self._trained) for parts in stored[0])
        if grads:
            self._trained |= {s.key(part) for parts in stored[1] for part in parts if part.is_floating_point()}
        for w in {*writes, *(w for key in statistics for w in s.writers.get(key, ()))}:
            self.ops[w] = replace(self.ops[w], changed=True)
        for w in {self._statistics[key] for key in read if key in self._statistics}:
            self.ops[w] = replace(self.ops[w], steers=True)
        self._statistics |= dict.fromkeys(statistics, index)
        hidden = {s.key(part) for parts in stored[1] for part in parts if not s.known(part)}
        for key in {*new, *changed, *hidden}:
            s.writers.setdefault(key, []).append(index)
        self.ops.append(
            OpRecord(
                op=func,
                nth=nth,
                shapes=tuple(tuple(t.shape) for t in outputs),
                bytes=sum(parts),
                parts=parts,
                flops=0 if view else ops.kernel_flops(func, args, kwargs, out),
                moved=0 if view else ops.moved_bytes(func, *([parts[-1] for parts in each] for each in stored)),
                reads=tuple(reads),
                view=view,
                random=ops.draws(func, args, kwargs),
                half=any(t.is_floating_point() and t.element_size() == 2 for t in inputs + outputs),
                grads=grads,
                outer=tuple(sorted((s.number(key), s.size[key]) for key in read if not s.writers.get(key))),
                values=tuple(sorted({w for key in values for w in s.writers.get(key, ())})),
                twin=None if view or changed else self._twin(func, args, kwargs, index, outputs),
                gathered=0 if (rule := ops.facts(func).gathered) is None else rule(args),
                names=words_of(func, nth, args, out, self.hidden),
            )
        )
        for tensor, label in operands_of(func, nth, args):
            self.named(tensor, label)

    def _twin(self, func: OpOverload, args: tuple, kwargs: dict, index: int, outputs: list) -> int | None:
        """Return the op that was called with the same, if none of it was changed since."""
        s = self.storages

        def place(tensor: torch.Tensor) -> Any:
            key = s.key(tensor)
            key = self._same.get(key, key)
            return key, len(s.writers.get(key, ())), tuple(tensor.shape), tensor.dtype, tensor.stride()

        if ops.draws(func, args, kwargs):
            return None
        # A tensor in it says nothing of its values.
        words = repr(map_tensors(lambda _: None, (args, kwargs)))
        call = (func, words, tuple(place(tensor) for tensor in tensors_in((args, kwargs))))
        first = self._calls.setdefault(call, index)
        if first == index:
            self._made[index] = [s.key(t) for t in outputs]
            return None
        self._same |= dict(zip((s.key(t) for t in outputs), self._made[first]))
        return first

    def needed(self) -> tuple[OpRecord, ...]:
        """Return the ops, with those marked whose storages autograd saves."""
        ops = list(self.ops)
        for position, key, _ in self.packs:
            for writer in self.storages.writers.get(key, ()):
                if writer < position:
                    ops[writer] = replace(ops[writer], needed=True)
        return tuple(ops)


class _Region(Checkpointed):
    """A module whose calls are traced as regions, while a recorder watches the block around it."""

    def __init__(self, module: nn.Module, path: str, recorder: Recorder) -> None:
        super().__init__(module)
        self.path, self.recorder = path, recorder

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Trace the call by itself: tensors that autograd saves in it are not in the block's trace."""
        outer, outputs, origin = self.recorder, [], self.recorder.storages.origin
        at, inputs = len(outer.ops), by_argument(args, kwargs)
        outer.inputs_of_regions += map(outer.pack, inputs.values())
        shared = {place: t for place, t in inputs.items() if origin.get(outer.storages.key(t)) not in (None, "input")}

        def call() -> Any:
            outputs.append(self.call(*args, **kwargs))
            return outputs[0]

        trace = record(
            call,
            name=self.path,
            params=outer.params,
            inputs={place: tensor for place, tensor in inputs.items() if place not in shared},
            shared=list(shared.values()),
        )
        outer.regions.append(TracedRegion(self.path, at, trace))
        return outputs[0]


def _statistics(func: OpOverload, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the running statistics that a batch norm changes, which its schema does not declare."""
    if packet_name(func) not in _BATCH_NORMS or not argument(func, args, kwargs, "training", "train"):
        return []
    return tensors_in([argument(func, args, kwargs, "running_mean"), argument(func, args, kwargs, "running_var")])


_SET = torch.ops.aten.set_.source_Tensor  # gives a tensor another storage, and writes no values
_BATCH_NORMS = ("aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm")


def record(
    call: Callable[[], Any],
    *,
    name: str,
    params: list[torch.Tensor],
    inputs: Mapping[Place, torch.Tensor],
    shared: list[torch.Tensor],
    module: nn.Module | None = None,
    regions: Collection[str] = (),
) -> BlockTrace:
    """Run `call` once, with or without fake tensors around it, and return its trace.

    Args:
        call: the forward pass of a block.
        name: for messages.
        params: its parameters and buffers: never counted.
        inputs: the tensors it is called with that are its own, by their places in the call.
        shared: the tensors it is called with that other blocks are called with too.
        module: the block, whose modules give their names to tensors; None: none do.
        regions: paths of those of its modules that are traced as regions.
    """
    recorder = Recorder(Hidden.of(list(inputs.values())))
    recorder.params = params
    recorder.declare("param", params)
    recorder.declare("shared", shared)
    recorder.declare("input", list(inputs.values()))
    saving = torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda packed: packed.tensor)
    with ExitStack() as around:
        if module is not None:
            for hook in watch_modules(module, lambda _: True):
                around.callback(hook.remove)
            for path in regions:
                around.enter_context(_Region(module.get_submodule(path), path, recorder).in_place())
        with heard_by(recorder), recorder, saving:
            out = call()  # autograd keeps its saved tensors as long as this
    s = recorder.storages
    outputs = {s.key(t) for t in tensors_in(out)}
    origin, packed = s.origin, recorder.kept()
    ours = {key for key in packed if origin.get(key) not in ("param", "shared", "constant")}
    own_inputs = {key for key, kind in origin.items() if kind == "input"}
    ops = recorder.needed()
    return BlockTrace(
        name=name,
        ops=ops,
        input_bytes=sum(s.size[key] for key in own_inputs),
        none_bytes=sum(s.size[key] for key in ours),
        kept_input_bytes=sum(s.size[key] for key in ours & own_inputs),
        kept_output_bytes=sum(s.size[key] for key in ours & outputs if key not in origin),
        last_pack=max((position for position, _, _ in recorder.packs), default=0),
        state_bytes=sum(s.size[key] for key in recorder.changed if origin.get(key) == "param"),
        draws=any(op.random for op in ops),
        kept_inputs=frozenset(place for place, tensor in inputs.items() if s.key(tensor) in ours),
        kept_shared=frozenset(position for position, tensor in enumerate(shared) if s.key(tensor) in packed),
        regions=tuple(recorder.regions),
    )


def trace_block(
    module: nn.Module,
    args: tuple,
    kwargs: Mapping[str, Any],
    *,
    name: str,
    shared: Collection[torch.Tensor],
    run: FakeRun,
    state: Mapping[str, torch.Tensor],
    call: Callable[..., Any] | None = None,
    regions: Collection[str] = (),
) -> BlockTrace:
    """Trace one call of `module` in a fake run in progress. Nothing is computed.

    Args:
        module: the block.
        args, kwargs: its arguments in the model. Their `requires_grad` counts, as it decides which tensors are saved.
        name: for messages.
        shared: those tensors among the arguments that all blocks are called with.
        run, state: the run, and the module's fake parameters and buffers in it.
        call: calls the module; default: the module itself.
        regions: as for `record`.
    """
    shared_ids = {id(t) for t in shared}
    replaced: dict[int, torch.Tensor] = {}

    def stand_in(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in replaced:
            # A tensor that is not fake is known, as a mask made of constants is.
            fake = run.sample(value) if isinstance(value, FakeTensor) else value.detach()
            replaced[id(value)] = fake.requires_grad_(value.requires_grad) if value.requires_grad else fake
        return replaced[id(value)]

    fake_args, fake_kwargs = map_tensors(stand_in, (args, kwargs))

    def run_block() -> Any:
        with run.casting(), with_state(module, dict(state)):
            return (call or module)(*fake_args, **fake_kwargs)

    return record(
        run_block,
        name=name,
        params=list(state.values()),
        inputs={place: replaced[id(t)] for place, t in by_argument(args, kwargs).items() if id(t) not in shared_ids},
        shared=[replaced[id(t)] for t in shared if id(t) in replaced],
        module=module,
        regions=regions,
    )
