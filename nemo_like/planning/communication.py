"""What is alive at one point of a step, and what FSDP2's communication adds to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from nemo_like.planning.microbatch import Microbatch
from nemo_like.planning.parts import Part
from nemo_like.planning.sharding import Sharding, UnitBytes


@dataclass(frozen=True)
class StepPoint:
    """One stretch of a step, when most is alive in it."""

    where: str
    phase: str
    """``forward`` | ``backward`` | ``optimizer``."""
    parts: dict[str, int]
    """Bytes by what they are."""
    upto: int
    """How many layer calls, from the first on, hold what they keep for backward."""
    in_flight: tuple[tuple[int, str, int], ...] = ()
    """Of a pipeline's rank: stage, what, and bytes of the microbatches that wait."""
    stage: int = 0
    """Of a pipeline: the one that runs."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass
class StepWalk:
    """What is alive now, by part; and the highest point so far."""

    now: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))
    best: dict[str, int] = field(default_factory=dict)
    best_total: int = -1
    best_at: str = ""
    log: list[StepPoint] | None = None
    """Gets every stretch, in order, where somebody asks for them."""
    upto: int = 0
    """This and the next three: see `StepPoint`."""
    phase: str = "forward"
    stage: int = 0
    in_flight: Callable[[], tuple[tuple[int, str, int], ...]] = tuple

    def look(self, where: str, extra: Mapping[str, int] = MappingProxyType({})) -> None:
        """Take this point for the highest, if it is; `extra`: bytes by part that are alive here alone."""
        total = sum(self.now.values()) + sum(extra.values())
        if total > self.best_total:
            self.best_total, self.best_at = total, where
            self.best = self._with(extra)
        if self.log is not None:
            self.log.append(StepPoint(where, self.phase, self._with(extra), self.upto, self.in_flight(), self.stage))

    def _with(self, extra: Mapping[str, int]) -> dict[str, int]:
        return self.now | {part: self.now[part] + value for part, value in extra.items()}


class Communication:
    """What FSDP2 has gathered and is reducing, as `torch.distributed.fsdp` does it with synchronous gathers."""

    def __init__(
        self, walk: StepWalk, sharding: Sharding, units: Sequence[UnitBytes | None], micro: Microbatch
    ) -> None:
        self.walk, self.now, self.s, self.units, self.micro = walk, walk.now, sharding, units, micro
        self.on = sharding.on
        self.flat: dict[int | str, int] = {}
        """Units whose flat buffer is there: fetched, not yet copied out; ``"tail"`` is one."""
        self.kept = (Part.GATHERED_ROOT, 0)
        """The flat buffer of the unit that forward copied out last: freed at the next copy-out."""
        self.open: dict[int, int] = {}
        """Units that are gathered."""
        self.tail_open = False
        self.last_reduce = 0

    def start(self) -> None:
        if not self.on:
            return
        self._gather(Part.GATHERED_ROOT, self.s.root)
        self._fetch_ahead(-1)

    def _gather(self, part: Part, unit: UnitBytes) -> None:
        """One unit into its flat buffer and out of it, in forward."""
        self.walk.look("gathering", {part: self._while_gathering(unit)})
        self._keep(part, unit.flat)
        self.now[part] += unit.flat + unit.gathered  # the flat buffer, and the parameters copied out of it
        self.walk.look("copying out", {part: unit.copied})

    def _while_gathering(self, unit: UnitBytes) -> int:
        """The flat buffer, what it is made from, and the copy of it that gloo receives into."""
        return unit.flat + unit.gather_input + self._copied_by_gloo(unit, unit.gathered)

    def _copied_by_gloo(self, unit: UnitBytes, size: int) -> int:
        return size if self.s.gloo and unit.gathered != unit.shard_gathered else 0

    def _keep(self, part: Part, size: int) -> None:
        """The flat buffer kept so far goes; the one of `size` bytes, counted by the caller, takes its place."""
        self.now[self.kept[0]] -= self.kept[1]
        self.kept = (part, size)

    def _fetch_ahead(self, i: int) -> None:
        for j in self.s.fetched_ahead(i, self.units):
            self._fetch("tail", self.s.tail) if j == len(self.units) else self._fetch(j, self.units[j])

    def _fetch(self, key: int | str, unit: UnitBytes | None) -> None:
        if unit is None or key in self.flat or key in self.open:
            return
        self.walk.look("gathering", {Part.GATHERED_LAYERS: self._while_gathering(unit)})
        self.flat[key] = unit.flat
        self.now[Part.GATHERED_LAYERS] += unit.flat

    def _copy_out(self, key: int | str, unit: UnitBytes) -> None:
        """In forward."""
        self._fetch(key, unit)
        self._keep(Part.GATHERED_LAYERS, self.flat.pop(key))
        self.now[Part.GATHERED_LAYERS] += unit.gathered
        self.walk.look("copying out", {Part.GATHERED_LAYERS: unit.copied})

    def before_forward(self, i: int) -> None:
        unit = self._unit(i)
        if not self.on or unit is None:
            return
        if i not in self.open:
            self._copy_out(i, unit)
            self.open[i] = unit.gathered
        self._fetch_ahead(i)

    def before_experts(self, unit: UnitBytes | None) -> None:
        """Experts are gathered inside the layer, when its forward comes to them; alone on their rank, copied."""
        if unit is not None:
            self.walk.look("gathering experts", {Part.GATHERED_LAYERS: self._while_gathering(unit)})
            self._keep(Part.GATHERED_LAYERS, unit.flat)
            self.now[Part.GATHERED_LAYERS] += unit.flat + unit.gathered

    def after_experts(self, unit: UnitBytes | None) -> None:
        if unit is not None and unit.reshard:
            self.now[Part.GATHERED_LAYERS] -= unit.gathered

    def gathered_in_backward(self, unit: UnitBytes | None) -> int:
        """Of experts, while their layer's backward runs, beyond those that forward left gathered."""
        return unit.gathered if unit is not None and unit.reshard else 0

    def reduce_experts(self, unit: UnitBytes, grads: int) -> None:
        """When backward has gone through the experts, before the rest of their layer's gradients."""
        self.now[Part.GATHERED_LAYERS] -= 0 if unit.reshard else unit.gathered
        self.reduce(unit, grads)

    def after_forward(self, i: int) -> None:
        unit = self._unit(i)
        if self.on and unit is not None and unit.reshard and i in self.open:
            self.now[Part.GATHERED_LAYERS] -= self.open.pop(i)

    def before_tail(self) -> None:
        if self.on and self.s.tail is not None:
            self._copy_out("tail", self.s.tail)
            self.tail_open = True

    def after_model(self) -> None:
        """At the end of the model's forward, the last flat buffer goes."""
        self._keep(Part.GATHERED_LAYERS, 0)

    def before_tail_backward(self) -> None:
        """The tail (or the root: one) fetches the layers before it. For whole logits that comes after the peak."""
        if self.on:
            self._fetch_behind(len(self.units), 1 if self.s.tail is None else self.s.prefetch[1])

    def after_tail_backward(self, grads: int) -> None:
        """The tail is reduced before the last layer's backward."""
        if not self.on:
            freed = self.s.tail.grad if self.micro.frees and self.s.tail is not None else 0
            self.now[Part.GRADIENTS] += grads - freed
            return
        if self.s.tail is not None:
            self.now[Part.GATHERED_LAYERS] -= self.s.tail.gathered if self.tail_open else 0
            self.reduce(self.s.tail, 0)

    def before_backward(self, i: int) -> None:
        unit = self._unit(i)
        if not self.on or unit is None:
            return
        if i not in self.open:
            self._fetch(i, unit)
            self.walk.look("copying out", {Part.GATHERED_LAYERS: unit.gathered + unit.copied})
            self.open[i] = unit.gathered
            self.now[Part.GATHERED_LAYERS] += unit.gathered - self.flat.pop(i)
        self._fetch_behind(i, self.s.prefetch[1])

    def _fetch_behind(self, i: int, count: int) -> None:
        for j in self.s.fetched_behind(i, self.units, count):
            self._fetch(j, self.units[j])

    def after_backward(self, i: int, grads: int, before: int) -> None:
        """`grads`: made by this layer's backward; `before`: whole ones that were there."""
        unit = self._unit(i)
        if not self.on or unit is None:
            self.now[Part.GRADIENTS] += grads - (before if self.micro.frees else 0)
            return
        self.now[Part.GATHERED_LAYERS] -= self.open.pop(i, 0)
        self.reduce(unit, grads)

    def reduce(self, unit: UnitBytes, grads: int) -> None:
        """Gradients are copied into the flat buffer, freed, reduced, and cast to the parameters' dtype."""
        if not self.micro.reduces:
            self.now[Part.GRADIENTS] += 0 if self.micro.adds else unit.whole_grad
            self.now[Part.RUNNING_LAYER] = max(0, self.now[Part.RUNNING_LAYER] - grads)
            return
        self.now[Part.REDUCE_BUFFERS] -= self.last_reduce
        self.now[Part.REDUCE_BUFFERS] += unit.reduce_input
        self.last_reduce = unit.reduce_input
        self.walk.look("copying gradients", {Part.REDUCE_BUFFERS: unit.held_in_reduce})
        running, self.now[Part.RUNNING_LAYER] = self.now[Part.RUNNING_LAYER], max(0, self.now[Part.RUNNING_LAYER] - grads)
        self.now[Part.GRADIENTS] -= unit.whole_grad if self.micro.frees else 0
        reducing = unit.reduce_output + unit.held_in_reduce + self._copied_by_gloo(unit, unit.reduce_input)
        self.walk.look("reducing gradients", {Part.REDUCE_BUFFERS: reducing, Part.GRADIENTS: self._cast(unit)})
        self.now[Part.GRADIENTS] += 0 if self.micro.adds else unit.grad
        self.now[Part.RUNNING_LAYER] = max(0, running - grads)

    def _cast(self, unit: UnitBytes) -> int:
        made = unit.grad or unit.host_grad
        return made if made != unit.reduce_output else 0

    def finish(self, root_grads: int) -> None:
        if not self.on:
            self.now[Part.GRADIENTS] += root_grads
            return
        self.now[Part.GATHERED_LAYERS], self.now[Part.GATHERED_ROOT] = 0, 0
        self.now[Part.OUTSIDE_OF_LAYERS] = root_grads
        self.reduce(self.s.root, 0)
        self.now[Part.REDUCE_BUFFERS] = 0

    def _unit(self, i: int) -> UnitBytes | None:
        return self.units[i]
