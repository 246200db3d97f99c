"""A training step of one rank as allocations and frees, in the order and on the streams in which PyTorch makes them.

What a layer and the model around the layers allocate was recorded (`nemo_like.planning.program.records`); one record of a
kind of layer is played for each of its layers. What FSDP2 gathers and reduces is added here, after
``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`` and ``_fsdp_param_group.py`` (PyTorch 2.13): the flat buffer
of an all-gather and the cast copy that it reads are made on a stream of their own (``all_gather_copy_in_stream``), the
gathered parameters copied out of it on the computing stream, one by one; the input of a reduce-scatter on the computing
stream, its output, which the gradients are views of, on the stream of the reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from nemo_like.planning.program.records import BackwardCall, BlockEvents, Log, OuterEvents
from nemo_like.planning.sharding import Sharding, UnitBytes

COMPUTE, GATHER, REDUCE = "compute", "gather", "reduce"


@dataclass
class Events:
    """Storages by name, each with the number of those that hold it: the last one frees it."""

    log: list[tuple[int, int, str]] = field(default_factory=list)
    """In order: the number of a storage, its bytes (0: it is freed), and its stream."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of every storage that was made."""
    _holders: dict[int, int] = field(default_factory=dict)

    def make(self, size: int, stream: str = COMPUTE) -> int:
        """A storage with one holder; 0, which may be held and freed as well, where it has no bytes."""
        if not size:
            return 0
        number = len(self.sizes) + 1
        self.sizes[number], self._holders[number] = size, 1
        self.log.append((number, size, stream))
        return number

    def hold(self, storage: int) -> int:
        if storage:
            assert self._holders[storage], "a storage is held after it was freed"
            self._holders[storage] += 1
        return storage

    def drop(self, storage: int) -> None:
        if not storage:
            return
        self._holders[storage] -= 1
        if not self._holders[storage]:
            del self._holders[storage]
            self.log.append((storage, 0, ""))

    def drop_all(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self.drop(storage)

    def blip(self, size: int, stream: str = COMPUTE) -> None:
        """Made and freed at once."""
        self.drop(self.make(size, stream))


@dataclass(frozen=True)
class LayerEvents:
    """One call of a layer."""

    events: BlockEvents
    unit: UnitBytes | None
    experts: UnitBytes | None
    inputs: int
    """Bytes of its inputs that it holds till its backward."""


@dataclass(frozen=True)
class Pass:
    """What a microbatch does with its gradients; as `nemo_like.planning.microbatch.Microbatch`."""

    accumulates: bool = False
    """Backward adds to gradients that are there."""
    reduces: bool = True
    adds: bool = False
    """What is reduced, or kept whole, is added to what is there."""


class UnitEvents:
    """The collectives of FSDP2's units."""

    def __init__(self, events: Events) -> None:
        self.e = events
        self.flat: dict[Hashable, int] = {}
        """Flat buffers of units that are fetched and not copied out yet."""
        self.open: dict[Hashable, list[int]] = {}
        """Gathered parameters."""
        self.kept = 0
        """The flat buffer that forward copied out last."""
        self.reducing = 0
        """The input of the last reduce-scatter."""
        self.grads: list[int] = []
        """Reduced gradients, or whole ones that wait for the last microbatch."""
        self.whole: dict[Hashable, list[int]] = {}

    def fetch(self, key: Hashable, unit: UnitBytes | None) -> None:
        if unit is None or key in self.flat or key in self.open:
            return
        cast = self.e.make(unit.gather_input, GATHER)
        self.flat[key] = self.e.make(unit.flat, GATHER)
        self.e.drop(cast)

    def copy_out(self, key: Hashable, unit: UnitBytes | None, *, forward: bool) -> None:
        if unit is None or key in self.open:
            return
        self.fetch(key, unit)
        if forward:
            self.let_go()
        self.open[key] = [self.e.make(size) for size in unit.each_gathered]
        self.e.blip(unit.copied)
        flat = self.flat.pop(key)
        if forward:
            self.kept = flat
        else:
            self.e.drop(flat)

    def let_go(self) -> None:
        """Of the flat buffer that was copied out last."""
        self.e.drop(self.kept)
        self.kept = 0

    def close(self, key: Hashable) -> None:
        self.e.drop_all(self.open.pop(key, ()))

    def reduce(self, key: Hashable, unit: UnitBytes | None, grads: Sequence[int], turn: Pass) -> None:
        """`grads`: whole gradients that backward made, with one holder."""
        e = self.e
        if unit is None or not unit.reduce_input:
            e.drop_all(grads)
            return
        if not turn.reduces:
            if turn.adds or turn.accumulates:
                e.drop_all(grads)
            else:
                self.whole[key] = [e.make(unit.whole_grad)]
                e.drop_all(grads)
            return
        e.drop(self.reducing)
        self.reducing = e.make(unit.reduce_input)
        e.blip(unit.held_in_reduce)
        e.drop_all(grads)
        e.drop_all(self.whole.pop(key, ()))
        out = e.make(unit.reduce_output, REDUCE)
        if unit.grad != unit.reduce_output:
            cast = e.make(unit.grad, REDUCE)
            e.drop(out)
            out = cast
        if turn.adds:
            e.drop(out)
        else:
            self.grads.append(out)

    def close_all(self) -> None:
        """Nothing is gathered any more."""
        for key in list(self.open):
            self.close(key)
        self.e.drop_all(self.flat.values())
        self.flat.clear()

    def finish(self) -> None:
        """The last reduction has ended."""
        self.e.drop(self.reducing)
        self.reducing = 0


class StepEvents:
    """Writes passes of microbatches into `Events`.

    Args:
        events: where to.
        sharding: FSDP2's units.
        tail_names: names of the outer parameters whose gradients the tail reduces.
        in_chunks: the head made its gradients in forward.
    """

    def __init__(
        self, events: Events, sharding: Sharding, tail_names: frozenset[str] = frozenset(), *, in_chunks: bool = False
    ) -> None:
        self.e, self.s = events, sharding
        self.on = sharding.on
        self.units = UnitEvents(events)
        self.tail_names, self.in_chunks = tail_names, in_chunks
        self.kept: list[int] = []
        """The output of the microbatch before."""
        self.grads: list[int] = []
        """Gradients that stay till the optimizer's step; FSDP2's are its units'."""

    def run(self, turn: Pass, layers: Sequence[LayerEvents], outer: OuterEvents) -> None:
        """Forward and backward of one microbatch.

        Args:
            turn: what becomes of its gradients.
            layers: the layer calls in the order in which they run.
            outer: what is around them.
        """
        one = Microstep(self, turn, layers, outer)
        one.forward()
        one.backward()

    def let_go(self) -> None:
        """Of the output of the microbatch before."""
        self.e.drop_all(self.kept)
        self.kept.clear()

    def zero_grad(self) -> None:
        """The gradients of the step go."""
        for grads in (self.grads, self.units.grads):
            self.e.drop_all(grads)
            grads.clear()


class Microstep:
    """One microbatch of a step."""

    def __init__(self, step: StepEvents, turn: Pass, layers: Sequence[LayerEvents], outer: OuterEvents) -> None:
        self.step, self.turn, self.layers, self.outer = step, turn, layers, outer
        self.e, self.units, self.s, self.on = step.e, step.units, step.s, step.on
        self.fsdp_units = [layer.unit for layer in layers]
        self.around: dict[int, int] = {}
        """Storages by their numbers in the outer log."""
        self.inside: list[dict[int, int]] = [{} for _ in layers]
        """Storages by their numbers in each layer's log."""
        self.inputs: list[list[int]] = [[] for _ in layers]
        """What each layer holds of its inputs."""
        self.waiting: list[int] = []
        """Gradients that the root reduces."""
        self.at = 0
        """Position in the outer log."""

    def forward(self) -> None:
        layers, outer, units = self.layers, self.outer, self.units
        if self.on:
            units.copy_out("root", self.s.root, forward=True)
            self._fetch_ahead(-1)
        for i, (layer, call) in enumerate(zip(layers, outer.calls)):
            self._play_outer(call.begin)
            self._hold_inputs(i, call.inputs)
            if self.on:
                units.copy_out(i, layer.unit, forward=True)
                self._fetch_ahead(i)
                units.copy_out(("experts", i), layer.experts, forward=True)
            outputs = {number for number in layer.events.outputs if number}
            late = self._play(layer.events.forward, self.inside[i], outputs)
            self._same([self.inside[i][n] for n in sorted(outputs) if n in self.inside[i]], call.end)
            self._drop(self.inside[i], late)
            for key, unit in ((("experts", i), layer.experts), (i, layer.unit)):
                if unit is not None and unit.reshard:
                    units.close(key)
        if self.on:
            units.copy_out("tail", self.s.tail, forward=True)
        self._play_outer(outer.forward_end)
        units.let_go()
        self.step.let_go()

    def go_on_as(self, turn: Pass, layers: Sequence[LayerEvents], outer: OuterEvents) -> None:
        """Between forward and backward: there are gradients now that were not there when it began. What does not allocate
        the same in forward as in the records that it began with stays as it is."""
        self.turn = turn
        if layers is not self.layers:
            renamed = [
                _renumbered(storages, old.events.forward, new.events.forward)
                for storages, old, new in zip(self.inside, self.layers, layers)
            ]
            self.layers = [old if own is None else new for own, old, new in zip(renamed, self.layers, layers)]
            self.inside = [old if own is None else own for own, old in zip(renamed, self.inside)]
        if outer is not self.outer:
            before, now = self.outer.log[: self.outer.forward_end], outer.log[: outer.forward_end]
            around = _renumbered(self.around, before, now)
            if around is not None:
                self.outer, self.around, self.at = outer, around, outer.forward_end

    def given_gradient(self, storage: int) -> None:
        """The gradient of what a stage of a pipeline sent on came into `storage`, and is not made: the first one of its
        size behind forward."""
        behind = self.outer.log[self.outer.forward_end :]
        made = next((number for number, size in behind if size == self.e.sizes[storage]), 0)
        if made:
            self.around[made] = self.e.hold(storage)

    def backward(self) -> None:
        outer, e = self.outer, self.e
        if self.on and self.step.in_chunks:
            self._fetch_behind(len(self.layers), 1 if self.s.tail is None else self.s.prefetch[1])
        backs = outer.backs
        self._play_outer(backs[0].begin if backs else outer.backward_end)
        self._after_head()
        ends = [back.begin for back in backs[1:]] + [outer.backward_end]
        for back, end in zip(backs, ends):
            self._play_outer(back.begin)
            self._layer_backward(back, end)
        self._play_outer(outer.backward_end)
        grads = [self.around.pop(n) for n in outer.param_grads.values() if n in self.around]
        if self.on:
            self.units.close_all()
            self.units.reduce("root", self.s.root, [*grads, *self.waiting], self.turn)
            self.units.finish()
        else:
            self.step.grads += grads
        for number, _ in outer.log[outer.backward_end :]:
            if number in self.around:
                self.step.kept.append(self.around.pop(number))
        for storages in (self.around, *self.inside):
            e.drop_all(storages.values())
        for held in self.inputs:
            e.drop_all(held)

    # --- one layer ----------------------------------------------------------------------------------------------------

    def _layer_backward(self, back: BackwardCall, end: int) -> None:
        i = back.layer
        layer, storages, units = self.layers[i], self.inside[i], self.units
        if self.on:
            units.copy_out(i, layer.unit, forward=False)
            if layer.unit is not None:
                self._fetch_behind(i, self.s.prefetch[1])
            units.copy_out(("experts", i), layer.experts, forward=False)
        self._give(layer.events, back.grads, end, storages)
        self._play(layer.events.backward, storages)
        made = [storages.pop(n) for n in layer.events.input_grads if n in storages]
        self._same(made, back.end)
        self.e.drop_all(made)
        grads = [storages.pop(n) for n in layer.events.param_grads if n in storages]
        if self.on:
            if layer.experts is not None:
                units.close(("experts", i))
                own = self._of_experts(grads, layer.experts.whole_grad)
                units.reduce(("experts", i), layer.experts, own, self.turn)
                grads = [grad for grad in grads if grad not in own]
            if layer.unit is None:
                self.waiting += grads
            else:
                units.close(i)
                units.reduce(i, layer.unit, grads, self.turn)
        else:
            self.step.grads += grads
        self.e.drop_all(self.inputs[i])
        self.inputs[i] = []

    def _of_experts(self, grads: Sequence[int], size: int) -> list[int]:
        """The largest gradients, as many as `size` bytes in the dtype of the reduction are: experts are the largest."""
        own: list[int] = []
        for grad in sorted(grads, key=lambda storage: -self.e.sizes[storage]):
            if sum(map(self.e.sizes.__getitem__, own)) + self.e.sizes[grad] <= size:
                own.append(grad)
        return own

    def _give(self, events: BlockEvents, given: Sequence[int], end: int, storages: dict[int, int]) -> None:
        """The gradients of a layer's output are those that came out of what follows it, which holds them no longer, but
        for what it still uses after `end`."""
        log = self.outer.log
        freed = {number for number, size in log[self.at : end] if not size}
        sizes = {number: size for number, size in events.backward if number in events.output_grads and size}
        for mine, theirs in zip(events.output_grads, given):
            storage = self.around.get(theirs)
            if storage is None or self.e.sizes[storage] != sizes[mine]:
                continue
            storages[mine] = self.around.pop(theirs) if theirs in freed else self.e.hold(storage)

    def _hold_inputs(self, i: int, numbers: Sequence[int]) -> None:
        """The largest of the layer's inputs, as far as it holds any."""
        left = self.layers[i].inputs
        mine = sorted((self.around[n] for n in numbers if n in self.around), key=lambda s: -self.e.sizes[s])
        for storage in mine:
            if left > 0:
                left -= self.e.sizes[storage]
                self.inputs[i].append(self.e.hold(storage))

    def _fetch_ahead(self, i: int) -> None:
        for j in self.s.fetched_ahead(i, self.fsdp_units):
            self.units.fetch(*((j, self.fsdp_units[j]) if j < len(self.layers) else ("tail", self.s.tail)))

    def _fetch_behind(self, i: int, count: int) -> None:
        for j in self.s.fetched_behind(i, self.fsdp_units, count):
            self.units.fetch(j, self.fsdp_units[j])

    def _after_head(self) -> None:
        tail = self.s.tail
        if self.on and tail is not None:
            self.units.close("tail")
            names = [name for name in self.outer.param_grads if name in self.step.tail_names]
            numbers = [self.outer.param_grads[name] for name in names]
            self.units.reduce("tail", tail, [self.around.pop(n) for n in numbers if n in self.around], self.turn)

    # --- logs ---------------------------------------------------------------------------------------------------------

    def _play_outer(self, end: int) -> None:
        self._play(self.outer.log[self.at : end], self.around)
        self.at = max(self.at, end)

    def _play(self, log: Log, storages: dict[int, int], late: Collection[int] = ()) -> list[int]:
        """Make and free what `log` says; what is there already is not made, and what somebody else has taken is not
        freed. Frees of those in `late` are left to the caller, who gets their numbers."""
        put_off = []
        make, drop = self.e.make, self.e.drop
        for number, size in log:
            if size:
                if number not in storages:
                    storages[number] = make(size)
            elif number in late:
                put_off.append(number)
            elif number in storages:
                drop(storages.pop(number))
        return put_off

    def _drop(self, storages: dict[int, int], numbers: Iterable[int]) -> None:
        for number in numbers:
            self.e.drop(storages.pop(number))

    def _same(self, made: Sequence[int], end: int) -> None:
        """Play the outer log to `end`, where what it makes of the size of one in `made` is that one."""
        left = list(made)
        for number, size in self.outer.log[self.at : end]:
            found = next((storage for storage in left if self.e.sizes[storage] == size), 0) if size else 0
            if found:
                left.remove(found)
                self.around[number] = self.e.hold(found)
            else:
                self._play(((number, size),), self.around)
        self.at = max(self.at, end)


def _renumbered(storages: dict[int, int], old: Log, new: Log) -> dict[int, int] | None:
    """`storages`, by their numbers in `old`, by those in `new`; None: these do not allocate the same."""
    if [size for _, size in old] != [size for _, size in new]:
        return None
    numbers = {before: now for (before, _), (now, _) in zip(old, new)}
    return {numbers[number]: storage for number, storage in storages.items()}
