"""Ranks that gather together must run the same layers, as FSDP2 pairs collectives by their order alone.

Where one rank skips a layer (LayerDrop, early exit, a loss of other layers), its next gather meets another layer's, and both
ranks compute with a mixture of weights. So each rank follows the events that all ranks are known to run:

1. An event is the start of a call, a gather of a unit in forward or in backward, its reduction, or the end of forward or
   backward. Events form a tree by the order in which they were seen. All ranks have the same tree.
2. Where nothing is known to follow, all ranks compare the event by a collective. So the first step is compared whole.
3. An event that followed here the last time costs a look into a dict.
4. A forward begins at the root of the tree; while a forward with gradients has had no backward, at the place after it. So
   a backward that one rank leaves out is a difference at the next forward. After `_WAITING` such forwards the tree goes on
   as from the root.
5. A rank at any other event puts a question into the process group's store, and goes on when all ranks have put the same.
   A rank for which nothing has changed puts none. Its second thread sees the question, and answers with the layer that ran.
"""

import atexit
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from nemo_like._util.log import warn_once
from nemo_like.distributed.consistency_checks import agree, by_ranks, mesh_groups, number_of
from nemo_like.distributed.launch import rank
from nemo_like.distributed.units import Unit
from nemo_like.torch_compat import (
    around_end_of_backward,
    before_each_gather,
    before_each_reduction,
    gather_ahead,
    own_store,
    read_dtypes_again,
    unseen,
)
from nemo_like.transformers_compat import layers_dropped_in_vain

_MOST = 20_000  # Places in the tree; then it begins again. Ranks that drop layers at random, alike, would fill memory.
_WAITING = 8  # Forwards in a row without a backward, as of pairs of answers, that the tree tells apart.
_LOOK = 0.5  # Seconds between two looks at the store of a rank that has nothing to ask.
_ANSWERS = 10.0  # Seconds that a rank waits for the others' events, once it is known that they differ.


class _Expected:
    """The events that were seen to follow one sequence of events."""

    __slots__ = ("last", "then")

    def __init__(self) -> None:
        self.then: dict[str, _Expected] = {}
        self.last: str | None = None


class LayerOrder:
    """Has the calls of one sharded model raise on all ranks of its mesh where they run different units."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], mesh: dist.device_mesh.DeviceMesh, scheduled: bool
    ) -> None:
        self._groups = mesh_groups(mesh)
        self._ranks = mesh.mesh.flatten().tolist()
        self._units: dict[str, nn.Module] = {}
        self._root = self._place = _Expected()
        # Forwards since the last backward, from the first one with gradients on; and whether the last one has ended.
        self._waiting, self._waits, self._ended = 0, not scheduled, False
        self._places = 0
        self._events: deque[str] = deque(maxlen=16 * (len(units) + 2))
        self._count = 0
        # Events at which this rank has put a question. The store may still name an old one.
        self._asked: deque[int] = deque(maxlen=4096)
        self._last = -1
        self._question = self._refused = -1
        self._store = own_store()
        self._key = f"nemo_like/layers/{number_of(self._ranks)}/{_watcher.number(self._ranks)}"
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end)
        around_end_of_backward(model, self._end_of_backward)
        for unit in units:
            module, name = unit.modules[0], unit.name or "the root"
            events = {way: f"the {way} of {name}" for way in ("forward", "backward")}
            self._units |= dict.fromkeys(events.values(), module)
            before_each_gather(module, partial(self._next, module, events))
            before_each_reduction(module, partial(self._event, f"the reduction of {name}"))
        _watcher.add(self)

    def _begin(self, model: nn.Module, _args: object) -> None:
        if not self._ended or not self._waiting:
            self._place, self._waiting = self._root, 0
        self._ended = False
        gradients = "with" if torch.is_grad_enabled() else "without"
        self._event(f"a forward in {'training' if model.training else 'evaluation'} mode {gradients} gradients")

    def _end(self, _model: nn.Module, _args: object, _output: object) -> None:
        self._event("the end of forward")
        self._ended = True
        if self._waits and (self._waiting or torch.is_grad_enabled()):
            self._waiting += 1

    def _end_of_backward(self) -> None:
        self._event("the end of backward")
        self._waiting = 0

    def _next(self, unit: nn.Module, events: dict[str, str], way: str) -> None:
        if way == "backward" and torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True was asked of a backward through a model that FSDP2 shards: it frees the weights that the "
                "second backward needs, and does not reduce its gradients. Compute a gradient penalty with "
                "strategy='ddp' or 'single'."
            )
        if way == "forward":
            read_dtypes_again(unit)
        self._event(events[way])

    def _event(self, event: str) -> None:
        index, place = self._count, self._place
        asks = event != place.last and bool(place.then)
        self._events.append(event)
        if asks:
            self._asked.append(index)  # in front of the count, by which the other thread goes
        self._count = index + 1
        if self._refused >= 0:
            raise self._error(self._refused)
        if event == place.last:
            if self._question == index:
                self.answer(index)
                raise self._error(index)
        elif asks:
            self._ask(index, event)
        else:
            with unseen():  # a collective
                agree(event, self._groups, _differing)
        if event not in place.then:
            self._places += 1
            if self._places > _MOST:
                self._places, self._root, place = 0, _Expected(), _Expected()
            place.then[event] = (self._waiting >= _WAITING and self._root.then.get(event)) or _Expected()
        place.last = event
        self._place = place.then[event]

    def _ask(self, index: int, event: str) -> None:
        """Return once all ranks have asked whether `event` is next."""
        store, key, pause = self._store, f"{self._key}/{index}", 1e-3
        deadline = time.monotonic() + store.timeout.total_seconds()
        self._post(index, event)
        if store.compare_set(f"{key}/event", "", event).decode() != event:
            store.set(f"{key}/differs", "1")
        store.add(f"{key}/count", 1)
        while store.add(f"{key}/count", 0) < len(self._ranks):
            store.set(f"{self._key}/asked", str(index))
            if store.check([f"{key}/differs"]) or time.monotonic() > deadline:
                raise self._error(index)
            time.sleep(pause)
            pause = min(2 * pause, _LOOK)
        if self._last >= 0:  # no rank waits there any more
            for name in (rank(), "event", "count") if rank() == self._ranks[0] else (rank(),):
                store.delete_key(f"{self._key}/{self._last}/{name}")
        self._last = index

    def look(self) -> None:
        """Answer, from another thread than the model's, a question about an event that this rank has passed."""
        if not self._store.check([f"{self._key}/asked"]):
            return
        index = int(self._store.get(f"{self._key}/asked"))
        self._question = index  # in front of the count: the model's thread sees the one, or this thread the other
        if self._count > index and index not in self._asked and self._refused < 0:
            self.answer(index)

    def answer(self, index: int) -> None:
        """Report that this rank did not ask at event `index`, and have its next event raise."""
        self._refused = index
        behind = self._count - index
        known = behind <= len(self._events)
        self._post(index, self._events[-behind] if known else "an event of long ago")
        self._store.set(f"{self._key}/{index}/differs", "1")

    def _post(self, index: int, event: str) -> None:
        self._store.set(f"{self._key}/{index}/{rank()}", json.dumps([event, self._events[-1]]))

    def _error(self, index: int) -> RuntimeError:
        keys = {number: f"{self._key}/{index}/{number}" for number in self._ranks}
        deadline = time.monotonic() + _ANSWERS
        while not self._store.check(list(keys.values())) and time.monotonic() < deadline:
            time.sleep(0.01)
        everyone = [
            (number, *json.loads(self._store.get(key))) if self._store.check([key]) else (number, "nothing yet", "")
            for number, key in keys.items()
        ]
        error = _differing([(number, event) for number, event, _ in everyone])
        if index in self._asked:  # the others may wait in a gather for this rank, and raise at their next event
            ahead = {now for number, event, now in everyone if now and event != self._events[-1]}
            if len(ahead) == 1 and (unit := self._units.get(now := ahead.pop())) is not None:
                try:
                    gather_ahead(unit, backward="backward" in now)
                except RuntimeError as lost:  # the others have raised, and their processes ended
                    error.__cause__ = lost
        return error


def _differing(everyone: list[tuple[int, str]]) -> RuntimeError:
    return RuntimeError(
        f"Ranks run different layers: next is {' and '.join(by_ranks(everyone))}. FSDP2 gathers and reduces each layer on "
        "all ranks together. Run the same layers everywhere: draw the skipped layers from a generator with the same seed on "
        "every rank, or run the layer and multiply its output by 0. Where the end of backward comes first on a rank, "
        "the input of its first layer requires no gradient there, and does on the others. Where a forward does, that "
        "rank left a backward out, or ran one more forward: decide that on all ranks together (all_reduce the condition "
        "of a guard against NaN), and evaluate under torch.no_grad()."
    )


class _OrderWatcher:
    """The thread that looks, for all models of this process, for questions of other ranks."""

    def __init__(self) -> None:
        self._orders: list[weakref.ref[LayerOrder]] = []
        self._made: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def number(self, ranks: list[int]) -> int:
        """Return the number of models that `ranks` have had before, which all of them count alike."""
        key = number_of(ranks)
        self._made[key] = self._made.get(key, -1) + 1
        return self._made[key]

    def add(self, order: LayerOrder) -> None:
        """Look for `order` as well."""
        self._orders = [each for each in self._orders if each() is not None] + [weakref.ref(order)]
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nemo_like layer order", daemon=True)
            self._thread.start()
            atexit.register(self._end)  # in C++ the end of the interpreter would find it (see `launch`)

    def _run(self) -> None:
        while not self._ended.wait(_LOOK):
            for reference in list(self._orders):
                if (order := reference()) is None:
                    continue
                try:
                    order.look()
                except RuntimeError:  # the store has gone with its process group
                    self._orders = [each for each in self._orders if each is not reference]
                del order

    def _end(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=1)


_watcher = _OrderWatcher()


def compare_layers(
    model: nn.Module, units: Sequence[Unit], mesh: dist.device_mesh.DeviceMesh, scheduled: bool = False
) -> None:
    """Have `model` raise on all ranks of `mesh` where they run different units, or one leaves a backward out.

    scheduled: the model is a stage of a pipeline, whose schedule calls forward and backward.

    The ranks of torch's ``fake`` back end are one, and compare nothing. A warning names LayerDrop that transformers turns
    off for a sharded model.
    """
    if (share := layers_dropped_in_vain(model)) is not None:
        warn_once(
            f"layerdrop is {share}, and transformers runs every layer of a model that FSDP shards: no layer is dropped. "
            "Set it to 0 in the config, or train with strategy='ddp'."
        )
    if mesh.size() > 1 and all(dist.get_backend(group) != "fake" for group in mesh_groups(mesh)):
        LayerOrder(model, units, mesh, scheduled)
