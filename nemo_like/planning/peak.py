"""The peak of a whole training step on one rank, and what it is made of.

A step is walked through layer by layer. What is alive at each point is the sum of: parameters, gradients and optimizer
state as they are sharded; what FSDP2 has gathered, fetched ahead or is reducing; what the layers hold between their
forward and backward; and what the running layer, or the stretch between two layers, needs while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nemo_like.options import OffloadConfig
from nemo_like.planning.block_memory import BlockMemory
from nemo_like.planning.microbatch import Microbatch
from nemo_like.planning.outer import OuterMemory, Stretch
from nemo_like.planning.sharding import Sharding, UnitBytes

PARTS = (
    "parameters", "optimizer state", "gradients", "gathered layers", "gathered root", "reduce buffers",
    "held activations", "running layer", "outside of layers", "kept output", "optimizer step",
)  # fmt: skip


@dataclass(frozen=True)
class LayerMemory:
    """One layer call under one choice."""

    held: int
    """Between forward and backward, inputs included where it holds them."""
    inputs: int
    """Those inputs."""
    memory: BlockMemory
    unit: UnitBytes | None
    """Its FSDP2 unit; None where it belongs to the root."""
    moved: int = 0
    """Of `held`, what waits in host memory."""
    grads: int = 0
    """Whole gradients of its parameters; used where they are freed while it runs (`Microbatch.frees`)."""
    experts: UnitBytes | None = None
    """The unit of its experts, inside; None where they are not split."""


@dataclass
class _Walk:
    """What is alive now, by part; and the highest point so far."""

    now: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    best: dict[str, int] = field(default_factory=dict)
    best_total: int = -1
    best_at: str = ""

    def look(self, where: str, **extra: int) -> None:
        total = sum(self.now.values()) + sum(extra.values())
        if total > self.best_total:
            self.best_total, self.best_at = total, where
            self.best = dict(self.now)
            for part, value in extra.items():
                self.best[part.replace("_", " ")] += value


@dataclass(frozen=True)
class Peak:
    """A predicted peak."""

    parts: dict[str, int]
    """Bytes by what they are, at the peak."""
    at: str
    """Where in the step."""
    held: int
    """Alive when the model's forward has ended, its output among it, beyond parameters and optimizer state; bytes."""

    @property
    def total(self) -> int:
        """The peak, bytes."""
        return sum(self.parts.values())


def step_peak(
    layers: Sequence[LayerMemory], outer: OuterMemory, sharding: Sharding, *, optimizer: tuple[int, int],
    tail_grads: int, root_grads: int, micro: Microbatch = Microbatch(),  # noqa: B008 - frozen
    offload: OffloadConfig = OffloadConfig("none"),  # noqa: B008 - frozen
) -> Peak:  # fmt: skip
    """Walk through forward and backward of one microbatch and the optimizer step, and return the highest point.

    Args:
        layers: the layer calls in the order in which they run.
        outer: the model around them.
        sharding: units and prefetch depths.
        optimizer: bytes of state, and of the step's temporaries.
        tail_grads, root_grads: whole gradients of the tail's and the root's parameters on one rank, where `outer` has
            them among what is alive.
        micro: which gradients are there already, and what becomes of those that are made.
        offload: how much of what moves to the host is on the device at one time.
    """
    walk = _Walk()
    now = walk.now
    outer = outer.counted_once([layer.inputs for layer in layers])
    now["parameters"], now["optimizer state"] = sharding.params, optimizer[0]
    now["gradients"] = micro.gradients
    now["kept output"] = outer.kept  # the microbatch's before
    comm = _Comm(walk, sharding, [layer.unit for layer in layers], micro)
    comm.start()
    for i, layer in enumerate(layers):
        _stretch(walk, outer.forward[i], f"before layer {i}, forward")
        comm.before_forward(i)
        now["outside of layers"] = outer.forward[i].left
        comm.before_experts(layer.experts)
        walk.look(f"forward of layer {i}", running_layer=layer.memory.forward_peak)
        comm.after_experts(layer.experts)
        now["held activations"] = _held(layers[: i + 1], offload)
        comm.after_forward(i)
    comm.before_tail()
    _stretch(walk, outer.head, "forward of the head")
    comm.after_model()
    now["kept output"] = 0  # the output before is gone, and this one is among what is outside of layers
    held = sum(now.values()) - now["parameters"] - now["optimizer state"]
    now["kept output"] = outer.kept
    now["outside of layers"] -= outer.kept
    if outer.in_chunks:
        comm.before_tail_backward()
    _stretch(walk, _less(outer.middle, outer.kept), "backward of the head")
    comm.after_tail_backward(tail_grads)
    for i in reversed(range(len(layers))):
        layer, stretch = layers[i], _less(_backward_stretch(outer, len(layers), i), outer.kept)
        comm.before_backward(i)
        now["held activations"] = _held(layers[:i], offload)
        now["outside of layers"] = stretch.left - tail_grads - layer.memory.output_grad
        gathered = comm.gathered_in_backward(layer.experts)
        walk.look(
            f"backward of layer {i}", running_layer=layer.memory.backward_peak + layer.inputs, gathered_layers=gathered
        )
        now["running layer"] = layer.memory.param_grad + layer.memory.input_grad
        grads = layer.memory.param_grad
        if layer.experts is not None:
            whole = layer.experts.whole_grad
            comm.reduce_experts(layer.experts, whole)
            now["running layer"] -= whole
            grads -= whole
        comm.after_backward(i, grads, layer.grads)
        now["running layer"] = 0
        after = outer.tail if i == 0 else outer.backward[len(layers) - 1 - i]
        _stretch(walk, _less(after, tail_grads + outer.kept), f"after layer {i}, backward")
    comm.finish(root_grads)
    now["outside of layers"] = 0
    walk.look("optimizer step", optimizer_step=optimizer[1])
    return Peak({part: value for part, value in walk.best.items() if value}, walk.best_at, held)


def _held(layers: Sequence[LayerMemory], offload: OffloadConfig) -> int:
    """What these layers hold on the device while the next one runs: the copies on their way out, or those that backward
    fetches ahead, are there still or again. The bound is that of many steps: one may be faster."""
    moved = [layer.moved for layer in layers]
    ahead = sum(moved[max(0, len(moved) - offload.prefetch) :])
    return sum(layer.held for layer in layers) - sum(moved) + max(ahead, min(sum(moved), offload.max_inflight_bytes))


def _stretch(walk: _Walk, stretch: Stretch, where: str) -> None:
    walk.now["outside of layers"] = 0
    walk.look(where, outside_of_layers=stretch.peak)
    walk.now["outside of layers"] = stretch.left


def _less(stretch: Stretch, size: int) -> Stretch:
    return Stretch(stretch.peak - size, stretch.left - size)


def _backward_stretch(outer: OuterMemory, count: int, i: int) -> Stretch:
    return outer.middle if i == count - 1 else outer.backward[count - 2 - i]


class _Comm:
    """What FSDP2 has gathered and is reducing, as `torch.distributed.fsdp` does it with synchronous gathers."""

    def __init__(self, walk: _Walk, sharding: Sharding, units: Sequence[UnitBytes | None], micro: Microbatch) -> None:
        self.walk, self.now, self.s, self.units, self.micro = walk, walk.now, sharding, units, micro
        self.on = sharding.world > 1
        self.flat: dict[int, int] = {}
        """Units whose flat buffer is there: fetched, not yet copied out."""
        self.kept = ("gathered root", 0)
        """The flat buffer of the unit that forward copied out last: freed at the next copy-out."""
        self.open: dict[int, int] = {}
        """Units that are gathered."""
        self.tail_open = False
        self.last_reduce = 0

    def start(self) -> None:
        if not self.on:
            return
        self._gather("gathered root", self.s.root)
        self._fetch_ahead(-1)

    def _gather(self, part: str, unit: UnitBytes) -> None:
        """One unit into its flat buffer and out of it, in forward."""
        self.walk.look("gathering", **{part.replace(" ", "_"): unit.gathered + unit.gather_input})
        self._keep(part, unit.gathered)
        self.now[part] += 2 * unit.gathered  # the flat buffer, and the parameters copied out of it
        self.walk.look("copying out", **{part.replace(" ", "_"): unit.copied})

    def _keep(self, part: str, size: int) -> None:
        """The flat buffer kept so far goes; the one of `size` bytes, counted by the caller, takes its place."""
        self.now[self.kept[0]] -= self.kept[1]
        self.kept = (part, size)

    def _fetch_ahead(self, i: int) -> None:
        for j in range(i + 1, min(i + 1 + self.s.prefetch[0], len(self.units))):
            if j not in self.flat and j not in self.open:
                self._fetch(j)

    def _fetch(self, j: int) -> None:
        unit = self.units[j]
        if unit is None:
            return
        self.walk.look("gathering", gathered_layers=unit.gathered + unit.gather_input)
        self.flat[j] = unit.gathered
        self.now["gathered layers"] += unit.gathered

    def before_forward(self, i: int) -> None:
        if not self.on:
            return
        unit = self._unit(i)
        if unit is None:
            return
        if i not in self.flat and i not in self.open:
            self._fetch(i)
        if i in self.flat:
            self._keep("gathered layers", self.flat.pop(i))
            self.open[i] = unit.gathered
            self.now["gathered layers"] += unit.gathered
            self.walk.look("copying out", gathered_layers=unit.copied)
        self._fetch_ahead(i)

    def before_experts(self, unit: UnitBytes | None) -> None:
        """Experts are gathered inside the layer, when its forward comes to them; alone on their rank, copied."""
        if unit is not None:
            flat = 0 if unit.gathered == unit.shard_gathered else unit.gathered
            self.walk.look("gathering experts", gathered_layers=flat + unit.gather_input)
            self._keep("gathered layers", flat)
            self.now["gathered layers"] += flat + unit.gathered

    def after_experts(self, unit: UnitBytes | None) -> None:
        if unit is not None and unit.reshard:
            self.now["gathered layers"] -= unit.gathered

    def gathered_in_backward(self, unit: UnitBytes | None) -> int:
        """Of experts, while their layer's backward runs, beyond those that forward left gathered."""
        return unit.gathered if unit is not None and unit.reshard else 0

    def reduce_experts(self, unit: UnitBytes, grads: int) -> None:
        """When backward has gone through the experts, before the rest of their layer's gradients."""
        self.now["gathered layers"] -= 0 if unit.reshard else unit.gathered
        self._reduce(unit, grads)

    def after_forward(self, i: int) -> None:
        unit = self._unit(i)
        if self.on and unit is not None and unit.reshard and i in self.open:
            self.now["gathered layers"] -= self.open.pop(i)

    def before_tail(self) -> None:
        if self.on and self.s.tail is not None:
            self._gather("gathered layers", self.s.tail)
            self.tail_open = True

    def after_model(self) -> None:
        """At the end of the model's forward, the last flat buffer goes."""
        self._keep("gathered layers", 0)

    def before_tail_backward(self) -> None:
        """The tail (or the root: one) fetches the layers before it. For whole logits that comes after the peak."""
        if self.on:
            self._fetch_behind(len(self.units), 1 if self.s.tail is None else self.s.prefetch[1])

    def after_tail_backward(self, grads: int) -> None:
        """The tail is reduced before the last layer's backward."""
        if not self.on:
            freed = self.s.tail.grad if self.micro.frees and self.s.tail is not None else 0
            self.now["gradients"] += grads - freed
            return
        if self.s.tail is not None:
            self.now["gathered layers"] -= self.s.tail.gathered if self.tail_open else 0
            self._reduce(self.s.tail, 0)

    def before_backward(self, i: int) -> None:
        unit = self._unit(i)
        if not self.on or unit is None:
            return
        if i not in self.open:
            if i not in self.flat:
                self._fetch(i)
            self.walk.look("copying out", gathered_layers=unit.gathered + unit.copied)
            self.open[i] = unit.gathered
            self.flat.pop(i)
        self._fetch_behind(i, self.s.prefetch[1])

    def _fetch_behind(self, i: int, count: int) -> None:
        for j in range(i - 1, max(-1, i - 1 - count), -1):
            if j not in self.flat and j not in self.open and self._unit(j) is not None:
                self._fetch(j)

    def after_backward(self, i: int, grads: int, before: int) -> None:
        """`grads`: made by this layer's backward; `before`: whole ones that were there."""
        unit = self._unit(i)
        if not self.on or unit is None:
            self.now["gradients"] += grads - (before if self.micro.frees else 0)
            return
        self.now["gathered layers"] -= self.open.pop(i, 0)
        self._reduce(unit, grads)

    def _reduce(self, unit: UnitBytes, grads: int) -> None:
        """Gradients are copied into the flat buffer, freed, reduced, and cast to the parameters' dtype."""
        if not self.micro.reduces:
            self.now["gradients"] += 0 if self.micro.adds else unit.whole_grad
            self.now["running layer"] = max(0, self.now["running layer"] - grads)
            return
        self.now["reduce buffers"] -= self.last_reduce
        self.now["reduce buffers"] += unit.reduce_input
        self.last_reduce = unit.reduce_input
        self.walk.look("copying gradients", reduce_buffers=unit.held_in_reduce)
        running, self.now["running layer"] = self.now["running layer"], max(0, self.now["running layer"] - grads)
        self.now["gradients"] -= unit.whole_grad if self.micro.frees else 0
        reducing = unit.reduce_output + unit.held_in_reduce
        self.walk.look("reducing gradients", reduce_buffers=reducing, gradients=self._cast(unit))
        self.now["gradients"] += 0 if self.micro.adds else unit.grad
        self.now["running layer"] = max(0, running - grads)

    def _cast(self, unit: UnitBytes) -> int:
        return unit.grad if unit.grad != unit.reduce_output else 0

    def finish(self, root_grads: int) -> None:
        if not self.on:
            self.now["gradients"] += root_grads
            return
        self.now["gathered layers"], self.now["gathered root"] = 0, 0
        self.now["outside of layers"] = root_grads
        self._reduce(self.s.root, 0)
        self.now["reduce buffers"] = 0

    def _unit(self, i: int) -> UnitBytes | None:
        return self.units[i]
