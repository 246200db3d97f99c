"""One micro-batch of one stage: forward and backward through its layers and the modules outside the layers.

Copies of activations to CPU memory and back (``offload=``) are written as `nemo_like.offload` makes them.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from nemo_like._util.tensors import Place
from nemo_like.activation_checkpointing.plan import Part
from nemo_like.options import OffloadConfig
from nemo_like.planning.memory_model.fsdp_units import EMBEDDING, ROOT, TAIL, FsdpBuffers, GradientRule
from nemo_like.planning.memory_model.storages import LAYER_INPUTS, LogRun, Storages
from nemo_like.planning.sharding import Sharding, UnitBytes
from nemo_like.planning.trace.records import BackwardCall, BlockEvents, OuterEvents


class HostCopies:
    """Writes the copies of one micro-batch.

    Args:
        storages: receives the copies.
        offload: limits how many bytes may be on their way, and how far ahead they are fetched.
        at_once: a copy to the host has ended when the next operator runs, as on the CPU; else any may still be on its way.
        inside: the runs of the layers' logs.
        inputs: for each layer, the storages of its inputs that it keeps.
    """

    def __init__(
        self, storages: Storages, offload: OffloadConfig, at_once: bool, inside: list[LogRun], inputs: list[list[int]]
    ) -> None:
        self.storages, self.offload, self.at_once, self.inside, self.inputs = storages, offload, at_once, inside, inputs
        # Copies to the host that may be on their way: bytes, the function that frees their source, and the layer.
        self.sent: deque[tuple[int, Callable[[], None], int]] = deque()
        # Bytes of each storage that was copied out, and the function that copies it back, by layer.
        self.away: dict[int, list[tuple[int, Callable[[], None]]]] = {}

    def send(self, i: int, *, inputs: bool, sizes: Sequence[int]) -> None:
        """Copy out the tensors that wait in CPU memory for layer `i`: its inputs, and storages of these bytes.

        Free the sources of copies that have arrived.
        """
        storages, run, back = self.storages, self.inside[i], list[tuple[int, Callable[[], None]]]()
        self.away[i] = back
        for storage in self.inputs[i] if inputs else ():
            size = storages.sizes.get(storage, 0)
            self.sent.append((size, partial(storages.drop, storage), i))
            back.append((size, partial(self._make_input, i, size)))
        if inputs:
            self.inputs[i] = []
        for size in sizes:
            gone: list[tuple[int, int]] = []
            self.sent.append((size, partial(self._move_out, run, size, gone), i))
            back.append((size, partial(self._move_back, run, gone)))
        most, at_least = (0, 0) if self.at_once else (self.offload.max_inflight_bytes, 1)
        while len(self.sent) > at_least and sum(size for size, _, _ in self.sent) > most:
            self.sent.popleft()[1]()

    def fetch(self, i: int, *, ahead: bool) -> None:
        """Copy back the tensors of layer `i`, and (`ahead`) those of the layers before it, the last copy first."""
        self._fetch_layer(i, None, 0)
        fetched = 0
        for j in range(i - 1, max(-1, i - 1 - self.offload.prefetch), -1) if ahead else ():
            fetched = self._fetch_layer(j, self.offload.max_inflight_bytes, fetched)

    def _fetch_layer(self, i: int, most: int | None, fetched: int) -> int:
        """Copy back the tensors of layer `i`; return the bytes so far. No copy begins once `most` have come."""
        for copy in [copy for copy in self.sent if copy[2] == i]:  # its copies out end first
            self.sent.remove(copy)
            copy[1]()
        waiting = self.away.get(i, [])
        while waiting and (most is None or fetched < most):
            size, copy_back = waiting.pop()
            copy_back()
            fetched += size
        return fetched

    def _make_input(self, i: int, size: int) -> None:
        self.inputs[i].append(self.storages.make(size, Part.SAVED_ACTIVATIONS, origin=LAYER_INPUTS))

    def _move_out(self, run: LogRun, size: int, gone: list[tuple[int, int]]) -> None:
        gone += filter(None, [self.storages.move_out(run, size)])

    def _move_back(self, run: LogRun, gone: list[tuple[int, int]]) -> None:
        for number, size in gone:
            self.storages.move_back(run, number, size)


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer under one choice."""

    events: BlockEvents
    unit: UnitBytes | None  # FSDP2 unit of the layer; None where it belongs to the root.
    experts: UnitBytes | None  # Unit of its experts, inside; None where they are not split.
    # Places of its inputs that it saves for its backward; None: all of its own.
    inputs: frozenset[Place] | None
    expert_weights: frozenset[str] = frozenset()
    # Bytes that its region saves and that are not tensors of the layer: the state of a generator, copies of buffers.
    state: int = 0
    copied: int = 0  # Bytes of buffers that its region copies while forward runs.
    moves_inputs: bool = False
    # Bytes of each further tensor that waits there, in the order in which they are copied out.
    moved: tuple[int, ...] = ()


class StageStep:
    """Writes passes of micro-batches through one stage.

    Args:
        storages: receives the allocations and frees.
        sharding: FSDP2's units.
        offload: limits how many bytes on their way to CPU memory are on the device at one time.
        copies_at_once: a copy to the host has ended when the next operator runs, as on the CPU; else any may still be on
            its way.
    """

    def __init__(
        self,
        storages: Storages,
        sharding: Sharding,
        *,
        buffers: Callable[[Storages, Sharding], FsdpBuffers] = FsdpBuffers,
        offload: OffloadConfig = OffloadConfig("none"),
        copies_at_once: bool = False,
    ) -> None:
        self.storages, self.sharding, self.on = storages, sharding, sharding.on
        self.buffers = buffers(storages, sharding)
        self.offload, self.copies_at_once = offload, copies_at_once
        self.kept: list[int] = []  # Storages of the output of the micro-batch before.
        # Gradients that stay till the optimizer's step, where FSDP2 does not reduce them.
        self.grads: dict[Hashable, list[int]] = {}
        # Names of parameters outside the layers whose gradients another stage of the rank has.
        self.elsewhere: frozenset[str] = frozenset()

    def zero_grad(self) -> None:
        """Free the gradients of the step."""
        for grads in (*self.grads.values(), self.buffers.grads):
            self.storages.empty(grads)

    def start_with_gradients(self, *, less: int = 0) -> None:
        """Make the gradients of the step before, but for `less` bytes that another stage of the rank has."""
        sizes = [unit.grad for unit in self.sharding.all]
        if self.on:
            self.buffers.grads += [self.storages.make(size, Part.GRADIENTS) for size in without(sizes, less)]
        else:
            self.grads["before"] = [self.storages.make(sum(sizes) - less, Part.GRADIENTS)]

    def keep_gradients(self, key: Hashable, grads: Sequence[int], rule: GradientRule) -> None:
        """Keep gradients till the optimizer's step; `key`: of a layer, or `ROOT`, or `TAIL`."""
        if rule.accumulates:  # to those that are there
            self.storages.drop_all(grads)
            grads = ()
        for grad in grads:
            self.storages.relabel(grad, Part.GRADIENTS)
        if rule.frees:
            self.storages.drop_all(self.grads.pop(key, ()))
        self.grads.setdefault(key, []).extend(grads)


class Microbatch:
    """One micro-batch of a step."""

    def __init__(self, step: StageStep, rule: GradientRule, layers: Sequence[LayerCall], events: OuterEvents) -> None:
        self.step, self.rule, self.layers, self.events = step, rule, layers, events
        self.storages, self.buffers, self.sharding, self.on = step.storages, step.buffers, step.sharding, step.on
        self.fsdp_units = [layer.unit for layer in layers]
        # Storages by their numbers in the log of the modules outside the layers.
        self.outside: dict[int, int] = {}
        self.inside: list[LogRun] = [LogRun() for _ in layers]
        self.inputs: list[list[int]] = [[] for _ in layers]  # Storages of the inputs that each layer saves.
        self.states: dict[int, int] = {}
        self.host = HostCopies(step.storages, step.offload, step.copies_at_once, self.inside, self.inputs)
        self.waiting: list[int] = []  # Gradients that the root reduces.
        self.at = 0  # Position in the log of the modules outside the layers.

    def forward(self) -> None:
        layers, events, buffers, storages = self.layers, self.events, self.buffers, self.storages
        if self.on:
            buffers.copy_out(ROOT, self.sharding.root, forward=True)
            self._embed()
        for i, (layer, call) in enumerate(zip(layers, events.calls)):
            storages.mark(f"before layer {i}, forward")
            self._run_outside(call.begin)
            self._hold_inputs(i, call.inputs)
            if self.on:
                buffers.copy_out(i, layer.unit, forward=True)
                self._gather_ahead(i)
                buffers.copy_out(("experts", i), layer.experts, forward=True)
            storages.mark(f"forward of layer {i}")
            copied, run = storages.make(layer.copied, Part.RUNNING_LAYER), self.inside[i]
            late = storages.run_log(layer.events.running.forward, run, Part.SAVED_ACTIVATIONS)
            for position, number in call.outputs.items():
                self._share_output(run, layer.events.outputs[position], number)
            self._run_outside(call.end)
            for number in late:
                storages.drop(run.alive.pop(number))
            storages.drop(copied)
            self.states[i] = storages.make(layer.state, Part.SAVED_ACTIVATIONS, origin="random states")
            self.host.send(i, inputs=layer.moves_inputs, sizes=layer.moved)
            for key, unit in ((("experts", i), layer.experts), (i, layer.unit)):
                if unit is not None and unit.reshard:
                    buffers.reshard(key, unit)
        if self.on:
            buffers.copy_out(TAIL, self.sharding.tail, forward=True)
        storages.mark("forward of the head")
        if self.sharding.tail is not None and self.sharding.tail.reshard and not self.events.in_chunks:
            self._run_outside(max(self._of(self.sharding.tail_names, events.returns), default=events.forward_end))
            buffers.reshard(TAIL)
        self._run_outside(events.forward_end)
        if self.sharding.root.reshard:
            buffers.reshard(ROOT)
        buffers.drop_flat()
        storages.empty(self.step.kept)

    def _embed(self) -> None:
        """Gather the units that the root gathers ahead, and run the embedding where it is a unit of its own."""
        buffers, embedding, ahead = self.buffers, self.sharding.embedding, self.sharding.prefetch[0]
        if self.sharding.one_stack and ahead:
            buffers.gather(EMBEDDING, embedding)
            self._gather_ahead(-1, ahead - 1)
        buffers.copy_out(EMBEDDING, embedding, forward=True)
        self._gather_ahead(-1)
        if embedding is not None and embedding.reshard:
            self._run_outside(max(self._of(self.sharding.embedding_names, self.events.returns), default=0))
            buffers.reshard(EMBEDDING, embedding)

    def sent_on(self) -> list[int]:
        """Return the storages of the stage's output; after forward."""
        return [self.outside[n] for n in self.events.outputs if n in self.outside]

    def take_ends(self) -> tuple[list[int], list[int]]:
        """Return the storages of the stage's output, and of the gradients of its inputs. The caller frees them."""
        output, grads = (
            [self.outside.pop(n) for n in numbers if n in self.outside]
            for numbers in (self.events.outputs, self.events.input_grads)
        )
        return output, grads

    def given_gradient(self, storage: int) -> None:
        """Use `storage` as the gradient that a later stage sent: it replaces the first of its size that backward makes."""
        behind = self.events.log[self.events.forward_end :]
        replaced = next((number for number, size in behind if size == self.storages.sizes[storage]), 0)
        if replaced:
            self.outside[replaced] = self.storages.hold(storage)

    def backward_of_inputs(self) -> None:
        """Run backward, or its first half where it was recorded in two."""
        events, storages, backs = self.events, self.storages, self.events.backs
        for number in events.outputs:
            storages.relabel(self.outside.get(number, 0), Part.KEPT_OUTPUT)
        storages.mark("loss")
        self._run_outside(events.loss_end)
        for i in self.events.dropped:
            self._drop_layer(i)
        storages.mark("backward of the head")
        self._begin_backward(backs[0].begin if backs else events.backward_end)
        if self.events.halves:
            self.buffers.add_waiting(TAIL, self.sharding.tail)
        else:
            self._reduce_tail()
        ends = [back.begin for back in backs[1:]] + [events.backward_end]
        for back, end in zip(backs, ends):
            self._layer_backward(back, end)
            storages.mark(f"after layer {back.layer}, backward")
            self._run_outside(end)
        self._run_outside(events.backward_end)
        if self.events.halves:
            for layer, run in zip(self.layers, self.inside):
                storages.run_log(layer.events.running.released, run, Part.SAVED_ACTIVATIONS)
            self.buffers.add_waiting(ROOT, self.sharding.root)

    def _begin_backward(self, end: int) -> None:
        """Run backward up to the first layer.

        At the root, and at the tail, FSDP2 gathers resharded parameters, and ahead of time the units that ran before.
        """
        buffers, events, tail, last = self.buffers, self.events, self.sharding.tail, len(self.layers)
        if self.on:
            self._run_outside(min(end, events.goes_back.get("", end)))
            buffers.copy_out(ROOT, self.sharding.root, forward=False)
            if self.sharding.root.gathered and tail is None:  # a root without parameters fetches nothing
                self._gather_behind(last, 1)
            elif self.sharding.root.gathered:
                buffers.gather(TAIL, tail)
            if tail is not None:
                if not self.events.in_chunks:
                    self._run_outside(min([end, *self._of(self.sharding.tail_names, events.goes_back)]))
                buffers.copy_out(TAIL, tail, forward=False)
                self._gather_behind(last, self.sharding.prefetch[1])
        self._run_outside(end)

    @staticmethod
    def _of(names: frozenset[str], positions: Mapping[str, int]) -> list[int]:
        return [at for name, at in positions.items() if name in names]

    def backward_of_weights(self) -> None:
        """Run the second half of backward, where there are two, and reduce the gradients of the root.

        Free all storages of the micro-batch, but for those that `take_ends` has returned.
        """
        events, storages = self.events, self.storages
        for i in range(len(self.layers) if self.events.halves else 0):  # in the order of the parameters
            layer, run = self.layers[i], self.inside[i]
            storages.mark(f"second half of backward of layer {i}")
            storages.run_log(layer.events.running.weights, run, Part.SAVED_ACTIVATIONS)
            self._reduce_layer(i, layer, run)
        storages.mark("end of backward")
        self._run_outside(events.weights_end)
        if self.events.halves:
            self._reduce_tail()
        apart = self.sharding.embedding_names if self.on else frozenset()
        of_embedding = _taken(self.outside, events.param_grads, apart)
        root_grads = _taken(self.outside, events.param_grads, events.param_grads.keys() - apart - self.step.elsewhere)
        self._reduce(ROOT, self.sharding.root, [*root_grads, *self.waiting])
        if self.on:
            self.buffers.close_all()
            self.buffers.reduce(EMBEDDING, self.sharding.embedding, of_embedding, self.rule)
            self.buffers.finish()
        storages.drop_all(self.outside.values())
        for i in range(len(self.layers)):
            self._drop_layer(i)

    def _drop_layer(self, i: int) -> None:
        self.storages.close(self.inside[i])
        self.storages.empty(self.inputs[i])
        self.storages.drop(self.states.pop(i, 0))

    # --- one layer ----------------------------------------------------------------------------------------------------

    def _layer_backward(self, back: BackwardCall, end: int) -> None:
        i, storages, buffers = back.layer, self.storages, self.buffers
        layer, run = self.layers[i], self.inside[i]
        if self.on:
            buffers.copy_out(i, layer.unit, forward=False)
            if layer.unit is not None:
                self._gather_behind(i, self.sharding.prefetch[1])
            buffers.copy_out(("experts", i), layer.experts, forward=False)
        storages.mark(f"backward of layer {i}")
        storages.drop(self.states.pop(i, 0))
        self.host.fetch(i, ahead=layer.moves_inputs or bool(layer.moved))
        storages.relabel_run(run, Part.RUNNING_LAYER)
        for storage in self.inputs[i]:
            storages.relabel(storage, Part.RUNNING_LAYER)
        self._share_gradients(layer.events, back.grads, end, run.alive)
        storages.run_log(layer.events.running.until_apart, run, Part.RUNNING_LAYER)
        if self.events.halves:
            buffers.add_waiting(("experts", i), layer.experts)
        else:
            self._reduce_experts(i, layer, run)
        storages.run_log(layer.events.running.rest, run, Part.RUNNING_LAYER)
        storages.relabel_run(run, Part.SAVED_ACTIVATIONS)
        for place, number in layer.events.input_grads.items():
            self._share_output(run, number, back.made.get(place, 0))
            storages.drop(run.alive.pop(number, 0))
        self._run_outside(back.end)
        if self.events.halves:  # its gradients come later
            buffers.add_waiting(i, layer.unit)
            for storage in (*self.inputs[i], *run.alive.values()):
                storages.relabel(storage, Part.SAVED_ACTIVATIONS)
            return
        for storage in self.inputs[i]:
            storages.relabel(storage, Part.OUTSIDE_OF_LAYERS)  # others may hold it still
        storages.empty(self.inputs[i])
        self._reduce_layer(i, layer, run)

    def _reduce_layer(self, i: int, layer: LayerCall, run: LogRun) -> None:
        if self.events.halves:
            self._reduce_experts(i, layer, run)
        grads = _taken(run.alive, layer.events.param_grads, layer.events.param_grads.keys())
        if self.on and layer.unit is None:
            self.waiting += grads
        else:
            self._reduce(i, layer.unit, grads)

    def _reduce_experts(self, i: int, layer: LayerCall, run: LogRun) -> None:
        """Reduce the gradients of a layer's experts, whose backward ends before that of the layer."""
        if layer.experts is not None:
            grads = _taken(run.alive, layer.events.param_grads, layer.expert_weights)
            self._reduce(("experts", i), layer.experts, grads)

    def _reduce_tail(self) -> None:
        """Reduce the gradients of the modules behind the layers, where they are a unit of their own."""
        if (tail := self.sharding.tail) is not None:
            self._reduce(TAIL, tail, _taken(self.outside, self.events.param_grads, self.sharding.tail_names))

    def _reduce(self, key: Hashable, unit: UnitBytes | None, grads: list[int]) -> None:
        """End backward of a unit with its gradients."""
        if self.on:
            self.buffers.close(key)
            self.buffers.reduce(key, unit, grads, self.rule)
        else:
            self.step.keep_gradients(key, grads, self.rule)

    def _share_output(self, run: LogRun, number: int, events: int) -> None:
        """Give a storage that a layer made the number that it has outside the layers."""
        if events and (storage := run.alive.get(number, 0)):
            self.storages.relabel(storage, Part.OUTSIDE_OF_LAYERS)
            self.outside[events] = self.storages.hold(storage)

    def _share_gradients(
        self, events: BlockEvents, grads: Mapping[int, int], end: int, storages: dict[int, int]
    ) -> None:
        """Give a layer the gradients of its output that the operators behind it made.

        They keep only those that they still use after `end`. A gradient that is an expanded number is made
        whole by the layer.
        """
        freed = {number for number, size in self.events.log[self.at : end] if not size}
        for position, mine in events.output_grads.items():
            theirs = grads.get(position, 0)
            storage = self.outside.get(theirs)
            if storage is None or self.storages.sizes.get(storage) != events.sizes.get(mine):
                continue
            storages[mine] = self.outside.pop(theirs) if theirs in freed else self.storages.hold(storage)
            self.storages.relabel(storage, Part.RUNNING_LAYER)

    def _hold_inputs(self, i: int, numbers: Mapping[Place, int]) -> None:
        places = self.layers[i].inputs
        for number in {number for place, number in numbers.items() if places is None or place in places}:
            if storage := self.outside.get(number, 0):
                self.inputs[i].append(self.storages.hold(storage))
                self.storages.relabel(storage, Part.SAVED_ACTIVATIONS, LAYER_INPUTS)

    # --- FSDP2 --------------------------------------------------------------------------------------------------------

    def _gather_ahead(self, i: int, most: int | None = None) -> None:
        for j in self.sharding.fetched_ahead(i, self.fsdp_units)[:most]:
            if j < len(self.layers):
                self._gather_layer(j)
            else:
                self.buffers.gather(TAIL, self.sharding.tail)

    def _gather_behind(self, i: int, count: int) -> None:
        for j in self.sharding.fetched_behind(i, self.fsdp_units, count):
            self._gather_layer(j)

    def _gather_layer(self, i: int) -> None:
        self.buffers.gather(i, self.fsdp_units[i])
        self.buffers.gather(("experts", i), self.layers[i].experts)

    # --- logs ---------------------------------------------------------------------------------------------------------

    def _run_outside(self, end: int) -> None:
        if self.at < end:
            entries = self.events.log[self.at : end]
            self.storages.run_entries(entries, self.outside, Part.OUTSIDE_OF_LAYERS, self.events.makers)
            self.at = end


def _taken(storages: dict[int, int], grads: Mapping[str, int], names: Collection[str]) -> list[int]:
    """Take the gradients of the parameters with these names out of `storages`, in the order of `grads`, and return them."""
    return [storages.pop(number) for name, number in grads.items() if name in names and number in storages]


def without(sizes: Sequence[int], less: int) -> Sequence[int]:
    """Return `sizes` of storages, but for `less` bytes in the largest ones, which are another stage's."""
    if not less:
        return sizes
    remaining = list(sizes)
    for at in sorted(range(len(remaining)), key=remaining.__getitem__, reverse=True):
        less, remaining[at] = max(0, less - remaining[at]), max(0, remaining[at] - less)
    return remaining
