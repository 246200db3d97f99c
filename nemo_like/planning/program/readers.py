"""What a program is written into: `Bytes` adds up levels, `Allocations` lists every allocation for the caching allocator.

Both follow the same storages. A recorded log of a layer is one entry for `Bytes`, which knows what it adds and its peak
(`Recorded.fold`), and all of its entries for `Allocations`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import STAYING, Part
from nemo_like.options.optimizers import OptimizerMemory
from nemo_like.planning.program.records import Recorded

COMPUTE, GATHER, REDUCE = "compute", "gather", "reduce"


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
    """Of a pipeline's rank: stage, what, and bytes of the micro-batches that wait."""
    stage: int = 0
    """Of a pipeline: the one that runs."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Peak:
    """A predicted peak."""

    parts: Mapping[str, int]
    """Bytes by what they are, at the peak."""
    at: str
    """Where in the step."""
    held: int
    """Alive when the model's forward has ended, its output among it, beyond what stays from step to step (`STAYING`);
    bytes."""

    @property
    def total(self) -> int:
        """The peak, bytes."""
        return sum(self.parts.values())

    @property
    def words(self) -> str:
        """Where it is, and the four largest parts: ``"optimizer step: parameters 1.00GiB, ..."``."""
        largest = sorted(self.parts.items(), key=lambda part: -part[1])[:4]
        return f"{self.at}: " + ", ".join(f"{name} {write_bytes(size)}" for name, size in largest)


@dataclass
class Frame:
    """The storages of one run of a recorded log."""

    storages: dict[int, int] = field(default_factory=dict)
    """By their numbers in the log: all, or for `Bytes` those that are exposed."""
    net: int = 0
    """Bytes of the others."""


class Away(NamedTuple):
    """A storage of a frame that waits in host memory."""

    number: int
    size: int


class Storages:
    """Storages by number, each with the number of those that hold it: the last one frees it."""

    phase, upto, stage = "forward", 0, 0
    """See `StepPoint`."""
    suffix = ""
    """Of the names of places: the action that runs."""

    def __init__(self) -> None:
        self.made = 0
        self.sizes: dict[int, int] = {}
        """Bytes of every storage that is alive."""
        self.holders: dict[int, int] = {}

    def make(self, size: int, part: Part, stream: str = COMPUTE) -> int:
        """A storage with one holder; 0, which may be held and freed as well, where it has no bytes."""
        if not size:
            return 0
        self.made += 1
        number = self.made
        self.sizes[number], self.holders[number] = size, 1
        self._alloc(number, size, part, stream)
        return number

    def hold(self, storage: int) -> int:
        if storage:
            self.holders[storage] += 1
        return storage

    def drop(self, storage: int) -> None:
        if not storage:
            return
        self.holders[storage] -= 1
        if not self.holders[storage]:
            del self.holders[storage]
            self._free(storage, self.sizes.pop(storage))

    def drop_all(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self.drop(storage)

    def blip(self, size: int, part: Part, stream: str = COMPUTE) -> None:
        """Made and freed at once."""
        self.drop(self.make(size, part, stream))

    def play_all(self, entries: Sequence[tuple[int, int]], storages: dict[int, int], part: Part) -> None:
        """Make and free what the entries of a log say; what is there already is not made, and what somebody else has taken
        is not freed."""
        make, drop = self.make, self.drop
        for number, size in entries:
            if size:
                if number not in storages:
                    storages[number] = make(size, part)
            elif number in storages:
                drop(storages.pop(number))

    # What the readers do differently. Most need no words about parts, places and marks.

    def _alloc(self, number: int, size: int, part: Part, stream: str) -> None:
        raise NotImplementedError

    def _free(self, number: int, size: int) -> None:
        raise NotImplementedError

    def play(self, log: Recorded, frame: Frame, part: Part) -> Sequence[int]:
        """Run a recorded log in `frame`; what stays of it afterwards is of `part`. Returns the numbers of what it frees at
        its end, which is left to the caller."""
        raise NotImplementedError

    def take_out(self, frame: Frame, size: int) -> Away | None:
        """Free a storage of so many bytes that `frame` keeps; None: it has none."""
        raise NotImplementedError

    def put_back(self, frame: Frame, away: Away) -> None:
        raise NotImplementedError

    def close(self, frame: Frame) -> None:
        """All that is left in it goes."""
        raise NotImplementedError

    def optimizer_step(self, memory: OptimizerMemory) -> None:
        raise NotImplementedError

    def mark(self, where: str) -> None:
        """What follows is called so."""

    def end_forward(self) -> None:
        """The model has returned."""

    def begin_action(self) -> None:
        """Of a pipeline's rank."""

    def end_action(self) -> tuple[int, int] | None:
        """The most bytes alive since it began, and those alive now; None: nobody counts."""
        return None

    def park(self, stage: int, number: int, what: str) -> None:
        """All that layers hold, and what is outside of them, waits with this micro-batch."""

    def unpark(self, stage: int, number: int, what: str) -> None:
        """It goes on."""

    def retag(self, storage: int, part: Part) -> None:
        """It is something else from now on."""

    def move(self, size: int, source: Part, target: Part) -> None:
        """So many bytes are."""


class Bytes(Storages):
    """How many bytes are alive, by part, and the highest level."""

    def __init__(self, points: list[StepPoint] | None = None) -> None:
        """`points`: gets every stretch between two marks."""
        super().__init__()
        self.now: dict[str, int] = dict.fromkeys(Part, 0)
        self.total = 0
        self.part: dict[int, Part] = {}
        self.best: dict[str, int] = {}
        self.best_total, self.best_at = -1, ""
        self.where = ""
        self.points = points
        self._most, self._parts, self._action = -1, self.now, 0
        self._at = self.phase, self.upto, self.stage
        self.parked: dict[tuple[int, int, str], tuple[int, int]] = {}
        """Of a pipeline, what waiting micro-batches hold: by stage, micro-batch and where they are, bytes that layers hold,
        and others."""
        self.held = 0

    def _alloc(self, number: int, size: int, part: Part, stream: str) -> None:
        self.part[number] = part
        self.now[part] += size
        self.total += size
        if self.total > self._action:
            self._action = self.total
        if self.total > self.best_total:
            self.best_total, self.best_at, self.best = self.total, self.where + self.suffix, self.now.copy()
        if self.points is not None and self.total > self._most:
            self._most, self._parts = self.total, self.now.copy()

    def _free(self, number: int, size: int) -> None:
        self.now[self.part.pop(number)] -= size
        self.total -= size

    def _look(self, extra: int) -> None:
        """So many bytes of the running layer are there for a moment."""
        total = self.total + extra
        if total > self._action:
            self._action = total
        if total > self.best_total:
            self.best_total, self.best_at, self.best = total, self.where + self.suffix, self.now.copy()
            self.best[Part.RUNNING_LAYER] += extra
        if self.points is not None and total > self._most:
            self._most, self._parts = total, self.now.copy()
            self._parts[Part.RUNNING_LAYER] += extra

    def play(self, log: Recorded, frame: Frame, part: Part) -> Sequence[int]:
        storages = frame.storages
        fold = log.fold(frozenset(storages), frozenset(n for n, s in storages.items() if self.holders.get(s) == 1))
        self._look(fold.peak)
        self.now[part] += fold.net
        self.total += fold.net
        frame.net += fold.net
        for number in fold.freed:
            self.drop(storages.pop(number))
        for number, size in fold.made:
            self.made += 1
            storages[number] = new = self.made
            self.sizes[new], self.holders[new], self.part[new] = size, 1, Part.RUNNING_LAYER
            self.now[Part.RUNNING_LAYER] += size
            self.total += size
        return fold.late

    def take_out(self, frame: Frame, size: int) -> Away | None:
        frame.net -= size
        self.now[Part.HELD_ACTIVATIONS] -= size
        self.total -= size
        return Away(0, size)

    def put_back(self, frame: Frame, away: Away) -> None:
        frame.net += away.size
        self.now[Part.HELD_ACTIVATIONS] += away.size
        self.total += away.size
        self._look(0)

    def close(self, frame: Frame) -> None:
        self.drop_all(frame.storages.values())
        self.now[Part.HELD_ACTIVATIONS] -= frame.net
        self.total -= frame.net
        frame.storages, frame.net = {}, 0

    def optimizer_step(self, memory: OptimizerMemory) -> None:
        self.blip(memory.step, Part.OPTIMIZER_STEP)
        if not memory.step:
            self._look(0)

    def mark(self, where: str) -> None:
        self._end()
        self.where, self._at = where, (self.phase, self.upto, self.stage)

    def _end(self) -> None:
        if self.points is not None:
            if self._most >= 0:
                phase, upto, stage = self._at
                self.points.append(StepPoint(self.where, phase, self._parts, upto, self.in_flight(), stage))
            self._most, self._parts = self.total, self.now.copy()

    def retag(self, storage: int, part: Part) -> None:
        if storage:
            self.move(self.sizes[storage], self.part[storage], part)
            self.part[storage] = part

    def move(self, size: int, source: Part, target: Part) -> None:
        self.now[source] -= size
        self.now[target] += size

    def begin_action(self) -> None:
        self._action = self.total

    def end_action(self) -> tuple[int, int] | None:
        return self._action, self.total

    def end_forward(self) -> None:
        self.held = self.total - sum(self.now[part] for part in STAYING)

    def in_flight(self) -> tuple[tuple[int, str, int], ...]:
        """See `StepPoint.in_flight`."""
        return tuple((stage, what, sum(sizes)) for (stage, _, what), sizes in self.parked.items())

    def park(self, stage: int, number: int, what: str) -> None:
        sizes = self.now[Part.HELD_ACTIVATIONS], self.now[Part.OUTSIDE_OF_LAYERS]
        self.parked[stage, number, what] = sizes
        self._park(sizes, 1)

    def unpark(self, stage: int, number: int, what: str) -> None:
        self._park(self.parked.pop((stage, number, what)), -1)

    def _park(self, sizes: tuple[int, int], sign: int) -> None:
        held, outside = sizes
        self.now[Part.HELD_ACTIVATIONS] -= sign * held
        self.now[Part.OUTSIDE_OF_LAYERS] -= sign * outside
        self.now[Part.MICROBATCHES_IN_FLIGHT] += sign * (held + outside)

    def peak(self) -> Peak:
        """The highest level so far."""
        self._end()
        return Peak({part: value for part, value in self.best.items() if value}, self.best_at, self.held)


class Allocations(Storages):
    """Every allocation and free."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[int, int, str]] = []
        """In order: the number of a storage, its bytes (0: it is freed), and its stream."""

    def _alloc(self, number: int, size: int, part: Part, stream: str) -> None:
        self.log.append((number, size, stream))

    def _free(self, number: int, size: int) -> None:
        self.log.append((number, 0, ""))

    def play(self, log: Recorded, frame: Frame, part: Part) -> Sequence[int]:
        late, storages, make, drop = [], frame.storages, self.make, self.drop
        for number, size in log.entries:
            if size:
                if number not in storages:
                    storages[number] = make(size, part)
            elif number in log.late:
                late.append(number)
            elif number in storages:
                drop(storages.pop(number))
        return late

    def take_out(self, frame: Frame, size: int) -> Away | None:
        own = frame.storages
        number = next((n for n, s in own.items() if self.sizes.get(s) == size and self.holders[s] == 1), 0)
        if not number:
            return None
        self.drop(own.pop(number))
        return Away(number, size)

    def put_back(self, frame: Frame, away: Away) -> None:
        frame.storages[away.number] = self.make(away.size, Part.HELD_ACTIVATIONS)

    def close(self, frame: Frame) -> None:
        self.drop_all(frame.storages.values())
        frame.storages = {}

    def optimizer_step(self, memory: OptimizerMemory) -> None:
        for each in memory.passes:
            before = 0
            for sizes in each.alone:
                made = [self._step(sizes[0])]
                if each.hands_over:
                    self.drop(before)
                made += map(self._step, sizes[1:])
                if not each.hands_over:
                    self.drop(before)
                self.drop_all(made[:-1])
                before = made[-1]
            self.drop(before)
            self.drop_all([self._step(size) for size in each.together])

    def _step(self, size: int) -> int:
        return self.make(size, Part.OPTIMIZER_STEP)
