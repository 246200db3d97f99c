"""One micro-batch of one stage: forward and backward through its layers and what is around them."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from nemo_like._util.tensors import Place
from nemo_like.activation_checkpointing.plan import Part
from nemo_like.options import OffloadConfig
from nemo_like.planning.program.readers import Away, Frame, Storages
from nemo_like.planning.program.records import BackwardCall, BlockEvents, Log, OuterEvents
from nemo_like.planning.program.units import ROOT, TAIL, Pass, Units
from nemo_like.planning.sharding import Sharding, UnitBytes


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer under one choice."""

    events: BlockEvents
    unit: UnitBytes | None
    """Its FSDP2 unit; None where it belongs to the root."""
    experts: UnitBytes | None
    """The unit of its experts, inside; None where they are not split."""
    inputs: frozenset[Place] | None
    """Where those of its inputs stand that it holds till its backward; None: all of its own."""
    expert_weights: frozenset[str] = frozenset()
    """Names of the parameters of `experts`."""
    state: int = 0
    """What its region keeps beside tensors of the layer: the state of a generator, copies of buffers."""
    copied: int = 0
    """What its region copies of its buffers while forward runs."""
    moves_inputs: bool = False
    """Its inputs wait in host memory."""
    moved: tuple[int, ...] = ()
    """What else does: bytes of each, in the order in which they are copied out."""

    @property
    def moves(self) -> bool:
        """Anything of it waits in host memory."""
        return self.moves_inputs or bool(self.moved)


@dataclass(frozen=True)
class Around:
    """What is around the layers in one pass."""

    events: OuterEvents
    idle: frozenset[int] = frozenset()
    """Layer calls that have no backward."""
    dropped: frozenset[int] = frozenset()
    """Of those, the ones that hold nothing when backward begins: nobody has what they returned any more."""
    in_chunks: bool = False
    """The head made its gradients in forward."""
    halves: bool = False
    """Backward is cut in two."""


class StageStep:
    """Writes passes of micro-batches through one stage.

    Args:
        storages: what it is written into.
        sharding: FSDP2's units.
        tail_names: names of the parameters around the layers whose gradients the tail reduces.
        offload: how much of what moves to the host is on the device at one time.
        copies_at_once: a copy to the host has ended when the next operator runs, as on the CPU; else any may still be on
            its way.
    """

    def __init__(
        self,
        storages: Storages,
        sharding: Sharding,
        tail_names: frozenset[str] = frozenset(),
        *,
        units: Callable[[Storages, Sharding], Units] = Units,
        offload: OffloadConfig = OffloadConfig("none"),
        copies_at_once: bool = False,
    ) -> None:
        self.e, self.s, self.on = storages, sharding, sharding.on
        self.units = units(storages, sharding)
        self.tail_names, self.offload, self.copies_at_once = tail_names, offload, copies_at_once
        self.kept: list[int] = []
        """The output of the micro-batch before."""
        self.grads: dict[Hashable, list[int]] = {}
        """Gradients that stay till the optimizer's step, where FSDP2 does not reduce them."""
        self.elsewhere: frozenset[str] = frozenset()
        """Names of parameters around the layers whose gradients another stage of the rank has."""

    def run(self, turn: Pass, layers: Sequence[LayerCall], around: Around) -> None:
        """Forward and backward of one micro-batch; `layers`: in the order in which they run."""
        one = Microbatch(self, turn, layers, around)
        one.forward()
        one.backward()
        self.kept += one.output
        self.e.drop_all(one.input_grads)

    def let_go(self) -> None:
        """Of the output of the micro-batch before."""
        self.e.drop_all(self.kept)
        self.kept.clear()

    def zero_grad(self) -> None:
        """The gradients of the step go."""
        for grads in (*self.grads.values(), self.units.grads):
            self.e.drop_all(grads)
            grads.clear()

    def keep_gradients(self, key: Hashable, grads: Sequence[int], turn: Pass) -> None:
        """Those of a layer, or of what is around all of them."""
        if turn.accumulates:  # to those that are there
            self.e.drop_all(grads)
            grads = ()
        for grad in grads:
            self.e.retag(grad, Part.GRADIENTS)
        if turn.frees:
            self.e.drop_all(self.grads.pop(key, ()))
        self.grads.setdefault(key, []).extend(grads)


class Microbatch:
    """One micro-batch of a step."""

    def __init__(self, step: StageStep, turn: Pass, layers: Sequence[LayerCall], around: Around) -> None:
        self.step, self.turn, self.layers, self.around = step, turn, layers, around
        self.outer = around.events
        self.e, self.units, self.s, self.on = step.e, step.units, step.s, step.on
        self.fsdp_units = [layer.unit for layer in layers]
        self.outside: dict[int, int] = {}
        """Storages by their numbers in the log of what is around the layers."""
        self.inside: list[Frame] = [Frame() for _ in layers]
        self.inputs: list[list[int]] = [[] for _ in layers]
        """What each layer holds of its inputs."""
        self.states: dict[int, int] = {}
        self.sent: deque[tuple[int, Callable[[], None], int]] = deque()
        """Copies to the host that may be on their way: bytes, and what frees their source."""
        self.away: dict[int, list[tuple[int, Callable[[], None]]]] = {}
        """By layer, of each storage that went its bytes, and what brings it back."""
        self.waiting: list[int] = []
        """Gradients that the root reduces."""
        self.at = 0
        """Position in the log of what is around the layers."""
        self.output: list[int] = []
        self.input_grads: list[int] = []

    def forward(self) -> None:
        layers, outer, units, e = self.layers, self.outer, self.units, self.e
        if self.on:
            units.copy_out(ROOT, self.s.root, forward=True)
            self._fetch_ahead(-1)
        for i, (layer, call) in enumerate(zip(layers, outer.calls)):
            e.mark(f"before layer {i}, forward")
            self._play_outer(call.begin)
            self._hold_inputs(i, call.inputs)
            if self.on:
                units.copy_out(i, layer.unit, forward=True)
                self._fetch_ahead(i)
                units.copy_out(("experts", i), layer.experts, forward=True)
            e.mark(f"forward of layer {i}")
            copied, frame = e.make(layer.copied, Part.RUNNING_LAYER), self.inside[i]
            late = e.play(layer.events.running_forward, frame, Part.HELD_ACTIVATIONS)
            for position, number in call.outputs.items():
                self._hand_on(frame, layer.events.outputs[position], number)
            self._play_outer(call.end)
            for number in late:
                e.drop(frame.storages.pop(number))
            e.drop(copied)
            self.states[i] = e.make(layer.state, Part.HELD_ACTIVATIONS)
            self._send_away(i)
            e.upto = i + 1
            for key, unit in ((("experts", i), layer.experts), (i, layer.unit)):
                if unit is not None and unit.reshard:
                    units.reshard(key)
        if self.on:
            units.copy_out(TAIL, self.s.tail, forward=True)
        e.mark("forward of the head")
        if self.s.tail is not None and self.s.tail.reshard and not self.around.in_chunks:
            self._play_outer(max(self._of_tail(outer.returns), default=outer.forward_end))
            units.reshard(TAIL)
        self._play_outer(outer.forward_end)
        if self.s.root.reshard:
            units.reshard(ROOT)
        units.let_go()
        self.step.let_go()
        e.end_forward()

    def go_on_as(self, turn: Pass, layers: Sequence[LayerCall], around: Around) -> None:
        """Between forward and backward, or its halves: there are gradients now that were not there before. What does not
        allocate the same so far as in the records that it began with stays as it is."""
        self.turn = turn
        halfway = self.at > self.outer.forward_end
        if layers is not self.layers:
            kept = []
            for frame, old, new in zip(self.inside, self.layers, layers):
                own = _renumbered(frame.storages, old.events.until(halfway), new.events.until(halfway))
                kept.append(old if own is None else new)
                frame.storages = frame.storages if own is None else own
            self.layers = kept
        old_log, outer = self.outer.log[: self.at], around.events
        at = outer.backward_end if halfway else outer.forward_end
        if outer is not self.outer and (own := _renumbered(self.outside, old_log, outer.log[:at])) is not None:
            self.around, self.outer, self.outside, self.at = around, outer, own, at

    def sent_on(self) -> list[int]:
        """After forward: the storages of what the stage returns."""
        return [self.outside[n] for n in self.outer.outputs if n in self.outside]

    def take_ends(self) -> tuple[list[int], list[int]]:
        """What the stage returned, and the gradients of what it was given, which whoever asks has to drop."""
        if not self.output and not self.input_grads:
            outer = self.outer
            self.output = [self.outside.pop(n) for n in outer.outputs if n in self.outside]
            self.input_grads = [self.outside.pop(n) for n in outer.input_grads if n in self.outside]
        found = self.output, self.input_grads
        self.output, self.input_grads = [], []
        return found

    def given_gradient(self, storage: int) -> None:
        """The gradient of what a stage of a pipeline sent on came into `storage`, and is not made: the first one of its
        size behind forward."""
        behind = self.outer.log[self.outer.forward_end :]
        made = next((number for number, size in behind if size == self.e.sizes[storage]), 0)
        if made:
            self.outside[made] = self.e.hold(storage)

    def backward(self) -> None:
        """All of it."""
        self.backward_of_inputs()
        self.backward_of_weights()

    def backward_of_inputs(self) -> None:
        """The first half, where it was recorded in two."""
        outer, e, backs = self.outer, self.e, self.outer.backs
        e.phase = "backward"
        for number in outer.outputs:
            e.retag(self.outside.get(number, 0), Part.KEPT_OUTPUT)
        e.mark("loss")
        self._play_outer(outer.loss_end)
        for i in self.around.dropped:
            self._let_layer_go(i)
        e.mark("backward of the head")
        self._begin_backward(backs[0].begin if backs else outer.backward_end)
        if self.around.halves:
            self.units.settle(TAIL, self.s.tail)
        else:
            self._after_head()
        ends = [back.begin for back in backs[1:]] + [outer.backward_end]
        for back, end in zip(backs, ends):
            self._layer_backward(back, end)
            e.mark(f"after layer {back.layer}, backward")
            self._play_outer(end)
        self._play_outer(outer.backward_end)
        if self.around.halves:
            self.units.settle(ROOT, self.s.root)

    def _begin_backward(self, end: int) -> None:
        """Up to the first layer's. Where backward comes to the root, and to the tail, FSDP2 gathers them if they were
        resharded, and fetches what ran before."""
        units, outer, tail, last = self.units, self.outer, self.s.tail, len(self.layers)
        if self.on:
            self._play_outer(min(end, outer.goes_back.get("", end)))
            units.copy_out(ROOT, self.s.root, forward=False)
            if self.s.root.gathered and tail is None:  # a root without parameters fetches nothing
                self._fetch_behind(last, 1)
            elif self.s.root.gathered:
                units.fetch(TAIL, tail)
            if tail is not None:
                if not self.around.in_chunks:
                    self._play_outer(min([end, *self._of_tail(outer.goes_back)]))
                units.copy_out(TAIL, tail, forward=False)
                self._fetch_behind(last, self.s.prefetch[1])
        self._play_outer(end)

    def _of_tail(self, positions: Mapping[str, int]) -> list[int]:
        return [at for name, at in positions.items() if name in self.step.tail_names]

    def backward_of_weights(self) -> None:
        """The rest. What is left of the micro-batch goes, but for what it returned and the gradients of what it was given:
        see `take_ends`."""
        outer, e = self.outer, self.e
        e.phase = "backward"
        for i in reversed(range(len(self.layers))):
            layer, frame = self.layers[i], self.inside[i]
            if self.around.halves:
                e.mark(f"second half of backward of layer {i}")
                e.play(layer.events.running_weights, frame, Part.HELD_ACTIVATIONS)
                self._reduce(i, layer, frame)
                self._let_layer_go(i)
        e.mark("end of backward")
        self._play_outer(outer.weights_end)
        if self.around.halves:
            self._after_head()
        names = [name for name, number in outer.param_grads.items() if number in self.outside]
        own = [self.outside.pop(outer.param_grads[name]) for name in names if name not in self.step.elsewhere]
        if self.on:
            self.units.close_all()
            self.units.reduce(ROOT, self.s.root, [*own, *self.waiting], self.turn)
            self.units.finish()
        else:
            self.step.keep_gradients(ROOT, own, self.turn)
        self.output, self.input_grads = self.take_ends()
        e.drop_all(self.outside.values())
        for i in range(len(self.layers)):
            self._let_layer_go(i)

    def _let_layer_go(self, i: int) -> None:
        self.e.close(self.inside[i])
        self.e.drop_all(self.inputs[i])
        self.inputs[i] = []
        self.e.drop(self.states.pop(i, 0))

    # --- one layer ----------------------------------------------------------------------------------------------------

    def _layer_backward(self, back: BackwardCall, end: int) -> None:
        i, e, units = back.layer, self.e, self.units
        layer, frame = self.layers[i], self.inside[i]
        if self.on:
            units.copy_out(i, layer.unit, forward=False)
            if layer.unit is not None:
                self._fetch_behind(i, self.s.prefetch[1])
            units.copy_out(("experts", i), layer.experts, forward=False)
        e.upto = i
        e.mark(f"backward of layer {i}")
        e.drop(self.states.pop(i, 0))
        self._bring_back(i)
        e.move(frame.net, Part.HELD_ACTIVATIONS, Part.RUNNING_LAYER)
        for storage in self.inputs[i]:
            e.retag(storage, Part.RUNNING_LAYER)
        self._give(layer.events, back.grads, end, frame.storages)
        if layer.experts is None or self.around.halves:
            e.play(layer.events.running_backward, frame, Part.RUNNING_LAYER)
        else:
            until, rest = layer.events.running_apart
            e.play(until, frame, Part.RUNNING_LAYER)
            self._reduce_experts(i, layer, frame)
            e.play(rest, frame, Part.RUNNING_LAYER)
        e.move(frame.net, Part.RUNNING_LAYER, Part.HELD_ACTIVATIONS)
        for place, number in layer.events.input_grads.items():
            self._hand_on(frame, number, back.made.get(place, 0))
            e.drop(frame.storages.pop(number, 0))
        self._play_outer(back.end)
        if self.around.halves:  # its gradients come later
            units.settle(i, layer.unit)
            for storage in (*self.inputs[i], *frame.storages.values()):
                e.retag(storage, Part.HELD_ACTIVATIONS)
            return
        for storage in self.inputs[i]:
            e.retag(storage, Part.OUTSIDE_OF_LAYERS)  # others may hold it still
        e.drop_all(self.inputs[i])
        self.inputs[i] = []
        self._reduce(i, layer, frame)

    def _reduce(self, i: int, layer: LayerCall, frame: Frame) -> None:
        units, storages = self.units, frame.storages
        if self.around.halves:
            self._reduce_experts(i, layer, frame)
        grads = [storages.pop(n) for n in layer.events.param_grads.values() if n in storages]
        if not self.on:
            self.step.keep_gradients(i, grads, self.turn)
            return
        if layer.unit is None:
            self.waiting += grads
        else:
            units.close(i)
            units.reduce(i, layer.unit, grads, self.turn)

    def _reduce_experts(self, i: int, layer: LayerCall, frame: Frame) -> None:
        """Their backward ends before that of what is before them in the layer."""
        if layer.experts is None:
            return
        numbers, storages = layer.events.param_grads, frame.storages
        own = [storages.pop(n) for name, n in numbers.items() if n in storages and name in layer.expert_weights]
        self.units.close(("experts", i))
        self.units.reduce(("experts", i), layer.experts, own, self.turn)

    def _hand_on(self, frame: Frame, number: int, outer: int) -> None:
        """What a layer made is number `outer` of what is around the layers."""
        if outer and (storage := frame.storages.get(number, 0)):
            self.e.retag(storage, Part.OUTSIDE_OF_LAYERS)
            self.outside[outer] = self.e.hold(storage)

    def _give(self, events: BlockEvents, given: Mapping[int, int], end: int, storages: dict[int, int]) -> None:
        """The gradients of a layer's output are those that came out of what follows it, which holds them no longer, but
        for what it still uses after `end`. One that is an expanded number is made whole by the layer."""
        freed = {number for number, size in self.outer.log[self.at : end] if not size}
        for position, mine in events.output_grads.items():
            theirs = given.get(position, 0)
            storage = self.outside.get(theirs)
            if storage is None or self.e.sizes.get(storage) != events.sizes.get(mine):
                continue
            storages[mine] = self.outside.pop(theirs) if theirs in freed else self.e.hold(storage)
            self.e.retag(storage, Part.RUNNING_LAYER)

    def _hold_inputs(self, i: int, numbers: Mapping[Place, int]) -> None:
        kept = self.layers[i].inputs
        for number in {number for place, number in numbers.items() if kept is None or place in kept}:
            if storage := self.outside.get(number, 0):
                self.inputs[i].append(self.e.hold(storage))
                self.e.retag(storage, Part.HELD_ACTIVATIONS)

    # --- host memory --------------------------------------------------------------------------------------------------

    def _send_away(self, i: int) -> None:
        """What of a layer waits in host memory is copied there, and freed when its copy must have ended."""
        layer, e, frame = self.layers[i], self.e, self.inside[i]
        back = self.away[i] = []
        for storage in self.inputs[i] if layer.moves_inputs else ():
            size = e.sizes.get(storage, 0)
            self.sent.append((size, functools.partial(e.drop, storage), i))
            back.append((size, functools.partial(self._take_back, i, size)))
        if layer.moves_inputs:
            self.inputs[i] = []
        for size in layer.moved:
            gone: list[Away] = []
            self.sent.append((size, functools.partial(self._take_out, frame, size, gone), i))
            back.append((size, functools.partial(self._put_back, frame, gone)))
        most = 0 if self.step.copies_at_once else self.step.offload.max_inflight_bytes
        at_least = 0 if self.step.copies_at_once else 1
        while len(self.sent) > at_least and sum(size for size, _, _ in self.sent) > most:
            self.sent.popleft()[1]()

    def _take_back(self, i: int, size: int) -> None:
        self.inputs[i].append(self.e.make(size, Part.HELD_ACTIVATIONS))

    def _take_out(self, frame: Frame, size: int, gone: list[Away]) -> None:
        gone += filter(None, [self.e.take_out(frame, size)])

    def _put_back(self, frame: Frame, gone: list[Away]) -> None:
        for each in gone:
            self.e.put_back(frame, each)

    def _bring_back(self, i: int) -> None:
        """What layer `i` needs, and what is fetched ahead for those before it, the last copy first."""
        offload, found = self.step.offload, 0
        self._come_back(i, None)
        if self.layers[i].moves:
            for j in range(i - 1, max(-1, i - 1 - offload.prefetch), -1):
                found = self._come_back(j, offload.max_inflight_bytes, found)

    def _come_back(self, i: int, most: int | None, found: int = 0) -> int:
        """Of layer `i`; no other copy begins once `most` bytes have come, and `found` did before."""
        self._end_copies(i)
        own = self.away.get(i, [])
        while own and (most is None or found < most):
            size, come = own.pop()
            come()
            found += size
        return found

    def _end_copies(self, i: int) -> None:
        """To the host, of what layer `i` has sent."""
        for size, free, j in [one for one in self.sent if one[2] == i]:
            self.sent.remove((size, free, j))
            free()

    # --- FSDP2 --------------------------------------------------------------------------------------------------------

    def _fetch_ahead(self, i: int) -> None:
        for j in self.s.fetched_ahead(i, self.fsdp_units):
            self.units.fetch(*((j, self.fsdp_units[j]) if j < len(self.layers) else (TAIL, self.s.tail)))

    def _fetch_behind(self, i: int, count: int) -> None:
        for j in self.s.fetched_behind(i, self.fsdp_units, count):
            self.units.fetch(j, self.fsdp_units[j])

    def _after_head(self) -> None:
        tail = self.s.tail
        if tail is None:
            return
        names = [name for name in self.outer.param_grads if name in self.step.tail_names]
        numbers = [self.outer.param_grads[name] for name in names]
        grads = [self.outside.pop(n) for n in numbers if n in self.outside]
        if self.on:
            self.units.close(TAIL)
            self.units.reduce(TAIL, tail, grads, self.turn)
        else:
            self.step.keep_gradients(TAIL, grads, self.turn)

    # --- logs ---------------------------------------------------------------------------------------------------------

    def _play_outer(self, end: int) -> None:
        if self.at < end:
            self.e.play_all(self.outer.log[self.at : end], self.outside, Part.OUTSIDE_OF_LAYERS)
            self.at = end


def _renumbered(storages: dict[int, int], old: Log, new: Log) -> dict[int, int] | None:
    """`storages`, by their numbers in `old`, by those in `new`; None: these do not leave the same. What comes and goes may
    differ: torch makes some numbers the first time that an operator runs in a process."""
    before, now = _left(old), _left(new)
    if [size for _, size in before] != [size for _, size in now]:
        return None
    numbers = {number: again for (number, _), (again, _) in zip(before, now)}
    return (
        {numbers[number]: storage for number, storage in storages.items()}
        if storages.keys() <= numbers.keys()
        else None
    )


def _left(log: Log) -> list[tuple[int, int]]:
    freed = {number for number, size in log if not size}
    return [(number, size) for number, size in log if size and number not in freed]
