"""Storages that the memory model writes into.

`Bytes` adds up levels, fast enough for a search: a recorded log of a layer is one entry, with the bytes it adds and its
peak (`Recorded.fold`). `Events` has each storage that is made, freed or counted as another part, with its origin: the
caching allocator, rows of reports and explanations are sums of that list.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nemo_like._util.table import totals
from nemo_like.activation_checkpointing.plan import Part
from nemo_like.options.optimizers import OptimizerMemory
from nemo_like.planning.trace.records import Recorded

COMPUTE, GATHER, REDUCE = "compute", "gather", "reduce"
LAYER_INPUTS = "layers' inputs"


@dataclass(frozen=True)
class Peak:
    """A predicted peak."""

    total: int  # Bytes.
    at: str  # Place in the step, in words.


@dataclass
class LogRun:
    """The storages of one run of a recorded log."""

    # Storages by their numbers in the log: all, or for `Bytes` those that are exposed.
    alive: dict[int, int] = field(default_factory=dict)
    other_bytes: int = 0  # Bytes of the storages that are not exposed.


class Storages:
    """Storages by number, each with the number of its holders: the last one frees it."""

    stage = 0  # The stage that runs, or whose storages are made.
    where = ""  # The stretch of the step that runs.
    suffix = ""  # Name of the action that runs, added to the names of places.

    def __init__(self) -> None:
        self.made = 0
        self.sizes: dict[int, int] = {}  # Bytes of every storage that is alive.
        self.holders: dict[int, int] = {}

    def make(self, size: int, part: Part, stream: str = COMPUTE, origin: Any = None) -> int:
        """Make a storage with one holder, and return its number; 0, which may be held and freed as well, for no bytes.

        origin: words for it, or the operator that makes it.
        """
        if not size:
            return 0
        self.made += 1
        number = self.made
        self.sizes[number], self.holders[number] = size, 1
        self._alloc(number, size, part, stream, origin)
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

    def empty(self, holders: list[int]) -> None:
        """Drop the storages of a list of holders, which has none then."""
        self.drop_all(holders)
        holders.clear()

    def make_and_drop(self, size: int, part: Part, stream: str = COMPUTE) -> None:
        """Make a storage and free it at once."""
        self.drop(self.make(size, part, stream))

    def run_entries(
        self, entries: Sequence[tuple[int, int]], storages: dict[int, int], part: Part, makers: Mapping[int, Any]
    ) -> None:
        """Make and free storages by the entries of a log; `makers`: the operators that made them.

        A storage that exists already is not made, and one that another holder has taken is not freed.
        """
        make, drop = self.make, self.drop
        for number, size in entries:
            if size:
                if number not in storages:
                    storages[number] = make(size, part, origin=makers.get(number))
            elif number in storages:
                drop(storages.pop(number))

    # These methods write every allocation and free. Readers that need less override them; most ignore parts and marks.

    def _alloc(self, number: int, size: int, part: Part, stream: str, origin: Any) -> None:
        raise NotImplementedError

    def _free(self, number: int, size: int) -> None:
        raise NotImplementedError

    def run_log(self, log: Recorded, run: LogRun, part: Part) -> Sequence[int]:
        """Run a recorded log in `run`; storages that stay afterwards belong to `part`.

        Return the numbers of the storages that it frees at its end: freeing them is left to the caller.
        """
        entries = [(n, size) for n, size in log.entries if size or n not in log.late]
        self.run_entries(entries, run.alive, part, log.makers)
        return [n for n, size in log.entries if not size and n in log.late]

    def move_out(self, run: LogRun, size: int) -> tuple[int, int] | None:
        """Free a storage of so many bytes that `run` has, and return its number there and its bytes; None: it has none."""
        for number, storage in run.alive.items():
            if self.sizes.get(storage) == size and self.holders[storage] == 1:
                self.drop(run.alive.pop(number))
                return number, size
        return None

    def move_back(self, run: LogRun, number: int, size: int) -> None:
        run.alive[number] = self.make(size, Part.SAVED_ACTIVATIONS)

    def close(self, run: LogRun) -> None:
        """Free all that is left of a run."""
        self.drop_all(run.alive.values())
        run.alive = {}

    def optimizer_step(self, memory: OptimizerMemory) -> None:
        for each in memory.passes:
            before = 0
            for sizes in each.alone:
                buffers = [self._step(sizes[0])]
                if each.hands_over:
                    self.drop(before)
                buffers += map(self._step, sizes[1:])
                if not each.hands_over:
                    self.drop(before)
                self.drop_all(buffers[:-1])
                before = buffers[-1]
            self.drop(before)
            self.drop_all([self._step(size) for size in each.together])

    def _step(self, size: int) -> int:
        return self.make(size, Part.OPTIMIZER_STEP, origin="temporaries")

    def mark(self, where: str) -> None:
        """Name the stretch that follows."""
        self.where = where

    def park(self, stage: int, number: int, what: str) -> None:
        """Count the saved activations of layers, and those outside the layers, as waiting with this micro-batch."""

    def unpark(self, stage: int, number: int, what: str) -> None:
        """Count the bytes of a waiting micro-batch as running again."""

    def relabel(self, storage: int, part: Part, origin: Any = None) -> None:
        """Count a storage as another part from now on; `origin`: other words for it."""

    def relabel_run(self, run: LogRun, part: Part) -> None:
        """Count the saved activations of a layer, or those that are left, as another part."""


class Bytes(Storages):
    """Level of bytes that are alive, and the highest one."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.best_total, self.best_at = -1, ""

    def _alloc(self, number: int, size: int, part: Part, stream: str, origin: Any) -> None:
        self.total += size
        self._look(0)

    def _free(self, number: int, size: int) -> None:
        self.total -= size

    def _look(self, extra: int) -> None:
        """Take into account bytes of the running layer that are alive for a moment."""
        if self.total + extra > self.best_total:
            self.best_total, self.best_at = self.total + extra, self.where + self.suffix

    def run_log(self, log: Recorded, run: LogRun, part: Part) -> Sequence[int]:
        storages = run.alive
        fold = log.fold(
            frozenset(storages), frozenset(n for n, storage in storages.items() if self.holders.get(storage) == 1)
        )
        self._look(fold.peak)
        self._add_others(run, fold.net)
        for number in fold.freed:
            self.drop(storages.pop(number))
        for number, size in fold.made:
            self.made += 1
            storages[number] = self.made
            self.sizes[self.made], self.holders[self.made] = size, 1
            self.total += size
        return fold.late

    def _add_others(self, run: LogRun, size: int) -> None:
        """Count more bytes of storages of a run that are not exposed."""
        run.other_bytes += size
        self.total += size

    def move_out(self, run: LogRun, size: int) -> tuple[int, int] | None:
        self._add_others(run, -size)
        return 0, size

    def move_back(self, run: LogRun, number: int, size: int) -> None:
        self._add_others(run, size)
        self._look(0)

    def close(self, run: LogRun) -> None:
        super().close(run)
        self._add_others(run, -run.other_bytes)

    def optimizer_step(self, memory: OptimizerMemory) -> None:
        self.make_and_drop(memory.step, Part.OPTIMIZER_STEP)
        if not memory.step:
            self._look(0)

    def peak(self) -> Peak:
        """Return the highest level so far."""
        return Peak(self.best_total, self.best_at)


class Label(NamedTuple):
    """Origin of a storage."""

    part: Part
    stage: int
    where: str  # The stretch of the step that made it.
    origin: Any  # Words for it, or the operator that made it; None: neither.


class Event(NamedTuple):
    """A storage that is made, freed, or counted under another label."""

    storage: int
    size: int  # Its bytes; freed: less than 0; 0: another label.
    label: Label  # From then on.
    where: str  # The stretch of the step.
    stream: str


_PARKED = (Part.SAVED_ACTIVATIONS, Part.OUTSIDE_OF_LAYERS)


class Events(Storages):
    """Every change of a storage, with its origin."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Event] = []
        self.labels: dict[int, Label] = {}  # Of every storage, the last one.
        self._own: set[int] = set()  # Storages of layers that no one else holds.
        self._parked: dict[tuple[int, int, str], dict[int, Label]] = {}

    def _alloc(self, number: int, size: int, part: Part, stream: str, origin: Any) -> None:
        self._note(number, size, Label(part, self.stage, self.where, origin), stream)

    def _free(self, number: int, size: int) -> None:
        self._note(number, -size, self.labels[number])

    def _note(self, storage: int, size: int, label: Label, stream: str = "") -> None:
        self.labels[storage] = label
        self.log.append(Event(storage, size, label, self.where, stream))

    def run_log(self, log: Recorded, run: LogRun, part: Part) -> Sequence[int]:
        """Run a log; all that it makes is the running layer's till it ends."""
        before = set(run.alive.values())
        late = super().run_log(log, run, Part.RUNNING_LAYER)
        for number, storage in run.alive.items():
            if storage not in before and number not in log.exposed:
                self._own.add(storage)
                self.relabel(storage, part)
        return late

    def relabel(self, storage: int, part: Part, origin: Any = None) -> None:
        if storage:
            label = self.labels[storage]
            self._note(storage, 0, label._replace(part=part, origin=origin or label.origin))

    def relabel_run(self, run: LogRun, part: Part) -> None:
        for storage in self._own.intersection(run.alive.values()):
            self.relabel(storage, part)

    def park(self, stage: int, number: int, what: str) -> None:
        moved = {storage: self.labels[storage] for storage in self.sizes if self.labels[storage].part in _PARKED}
        self._parked[stage, number, what] = moved
        for storage in moved:
            self._note(storage, 0, Label(Part.MICROBATCHES_IN_FLIGHT, stage, what, number))

    def unpark(self, stage: int, number: int, what: str) -> None:
        for storage, label in self._parked.pop((stage, number, what)).items():
            self._note(storage, 0, label)


def labels_after(events: Iterable[Event]) -> dict[Label, int]:
    """Return the bytes of each label behind `events`."""
    alive: dict[int, tuple[int, Label]] = {}
    for storage, size, label, _, _ in events:
        if size < 0:
            del alive[storage]
        else:
            alive[storage] = size or alive[storage][0], label
    return totals((label, size) for size, label in alive.values())


def at_peak(events: Sequence[Event], start: int = 0) -> dict[Label, int]:
    """Return the bytes of each label at the highest level of `events`, from number `start` on."""
    levels = list(itertools.accumulate(event.size for event in events))
    return labels_after(events[: levels.index(max(levels[start:]), start) + 1])


def part_bytes(labels: Mapping[Label, int]) -> dict[str, int]:
    """Return the bytes of each part, in the order of `Part`."""
    sizes = totals((label.part, size) for label, size in labels.items())
    return {part: sizes[part] for part in Part if part in sizes}
