"""Record what regions do: per operator the decision, the bytes saved, the FLOPs, and whether backward reads it.

    with trace_regions() as trace:
        loss = model(**batch).loss
    print(trace.regions[0].kept_bytes, trace.regions[0].rows())

Tracing holds on to every storage of a region's forward while it runs; don't leave it on in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nemo_like._util.op_lookup import Op
from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing import ops
from nemo_like.activation_checkpointing.engine import dispatch
from nemo_like.activation_checkpointing.engine.handles import Kept
from nemo_like.activation_checkpointing.policy import HOST, SAVE, SKIP, Decision
from nemo_like.torch_compat import TorchDispatchMode


@dataclass
class OpCall:
    """One operator call in a region's forward."""

    op: str
    decision: Decision | None
    """None: the operator is not tracked; recomputation always runs it."""
    flops: int
    made: frozenset[int]
    """The storages it made."""
    reads: frozenset[int]
    writes: frozenset[int]
    """Storages it changed in place."""
    reached: bool = False
    """It ran before autograd saved its last tensor, so that recomputation computes it."""
    read: bool = False
    """Backward needs its output: autograd saved it, or something that recomputation makes of it."""


@dataclass(frozen=True)
class OpRow:
    """All calls of one operator with one decision."""

    op: str
    decision: str
    count: int
    kept_bytes: int
    """Bytes of the calls that are saved and that the recomputation reaches; each storage once."""
    flops: int
    read: int
    """Number of the calls that backward reads."""
    note: str = ""


@dataclass
class RegionTrace:
    """One region call."""

    name: str
    calls: list[OpCall] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    """Storage → bytes, of those that the region made."""
    packed: set[int] = field(default_factory=set)
    """Storages that autograd saved."""
    input_bytes: int = 0
    tokens: int = 0
    """Rows of the first input: everything but its last dim."""

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that the policy saves besides the inputs, on the device or the host."""
        return self._bytes({key for call in self.calls for key in call.made if self._is_kept(call)})

    @property
    def none_bytes(self) -> int:
        """Return the bytes that autograd would save of the region without checkpointing."""
        return self._bytes(self.packed)

    @property
    def forward_flops(self) -> int:
        """One forward pass."""
        return sum(call.flops for call in self.calls)

    @property
    def replay_flops(self) -> int:
        """Return the FLOPs that backward recomputes under this policy."""
        return sum(call.flops for call in self.calls if call.reached and call.decision not in (SAVE, HOST, SKIP))

    @property
    def full_flops(self) -> int:
        """Return the FLOPs that backward would recompute if nothing were saved."""
        return sum(call.flops for call in self.calls if call.reached)

    def rows(self) -> list[OpRow]:
        """One per operator and decision, in order of appearance."""
        groups: dict[tuple[str, str], list[OpCall]] = {}
        for call in self.calls:
            word = "not tracked" if call.decision is None else call.decision.name
            groups.setdefault((call.op, word), []).append(call)
        return [
            OpRow(
                op=op,
                decision=word,
                count=len(calls),
                kept_bytes=self._bytes({key for call in calls if self._is_kept(call) for key in call.made}),
                flops=sum(call.flops for call in calls),
                read=sum(call.read for call in calls),
                note=self._note(calls),
            )
            for (op, word), calls in groups.items()
        ]

    def _bytes(self, keys: set[int]) -> int:
        return sum(self.sizes.get(key, 0) for key in keys)

    @staticmethod
    def _is_kept(call: OpCall) -> bool:
        return call.reached and call.decision in (SAVE, HOST)

    def _note(self, calls: list[OpCall]) -> str:
        unread = [call for call in calls if not call.read]
        kept = sum(self._is_kept(call) for call in unread)
        dropped = sum(call.decision in (SAVE, HOST) and not call.reached for call in calls)
        wasted = [call for call in unread if call.reached and call.flops and call.decision not in (SAVE, HOST, SKIP)]
        notes = []
        if kept:
            notes.append(f"{kept} saved that backward doesn't read")
        if dropped:
            notes.append(f"{dropped} not saved after all: the recompute stops before it")
        if wasted:
            paid = sum(call.flops for call in wasted)
            notes.append(f"{len(wasted)} recomputed that backward doesn't read ({paid:.3g} FLOPs): SKIP it")
        return "; ".join(notes)

    def finish(self, last_call: int) -> None:
        """Work out what recomputation reaches and backward reads: one sweep from the last call to the first."""
        needed = set(self.packed)
        for index in range(len(self.calls) - 1, -1, -1):
            call = self.calls[index]
            call.reached = index < last_call
            call.read = bool((call.made | call.writes) & needed)
            if call.read and call.decision not in (SAVE, HOST):
                needed |= call.reads


class _Recorder(TorchDispatchMode):
    """Is innermost in one region's forward: every call passes here before the policy sees it."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, name: str, kept: Callable[[], list[Kept]], inputs: list[Tensor]) -> None:
        super().__init__()
        self.trace = RegionTrace(name)
        self._kept = kept
        self._held: dict[int, Any] = {}
        self._last_call = 0
        self._existing = {self._key(tensor) for tensor in inputs}
        self.trace.input_bytes = sum(self._held[key].nbytes() for key in self._existing)
        if inputs:
            self.trace.tokens = inputs[0].numel() // max(inputs[0].shape[-1] if inputs[0].dim() else 1, 1)

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        return self._held.setdefault(storage._cdata, storage)._cdata

    def __torch_dispatch__(self, func: Op, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = len(self._kept())
        reads = frozenset(map(self._key, tensors_in(args) + tensors_in(kwargs)))
        self._existing |= {key for key in reads if key not in self.trace.sizes}
        out = func(*args, **kwargs)
        kept = self._kept()
        outputs = frozenset(map(self._key, tensors_in(out)))
        created = outputs - reads - self._existing - self.trace.sizes.keys()
        self.trace.sizes.update((key, self._held[key].nbytes()) for key in created)
        if not created and not ops.facts(func).mutating:
            return out  # a view, a query: free
        self.trace.calls.append(
            OpCall(
                op=str(func),
                decision=kept[-1].decision if len(kept) > before else None,
                flops=ops.flops(func, args, kwargs, out),
                made=frozenset(created),
                reads=reads,
                writes=outputs & reads if ops.facts(func).mutating else frozenset(),
            )
        )
        return out

    def packed(self, tensor: Tensor) -> None:
        """Autograd saves `tensor` now."""
        key = self._key(tensor)
        if key in self.trace.sizes:
            self.trace.packed.add(key)
        self._last_call = len(self.trace.calls)

    def finish(self) -> RegionTrace:
        """At the end of the region's forward."""
        # A tensor that an operator saves of its own result is packed when the call is already in the list.
        self.trace.finish(self._last_call)
        self._held = {}
        return self.trace


@dataclass
class Trace:
    """A record of what `trace_regions` saw."""

    regions: list[RegionTrace] = field(default_factory=list)
    """One per region call, in the order in which they ended."""

    @property
    def kept_bytes(self) -> int:
        """Return the saved bytes of all regions."""
        return sum(region.kept_bytes for region in self.regions)


@contextmanager
def trace_regions() -> Iterator[Trace]:
    """Trace every region whose forward runs inside, in this thread and others.

    Raises RuntimeError if a trace is already being made.
    """
    trace = Trace()

    def start(name: str, kept: Callable[[], list[Kept]], inputs: list[Tensor]) -> _Recorder:
        return _Recorder(name, kept, inputs)

    with dispatch.watching(start, lambda recorder: trace.regions.append(recorder.finish())):
        yield trace


def table_of(trace: RegionTrace) -> dict[str, Any]:
    """One region as plain JSON values: its rows, and its totals together with those of the alternatives."""
    tokens = max(trace.tokens, 1)
    return {
        "region": trace.name,
        "tokens": trace.tokens,
        "rows": [{**vars(row), "kept_bytes_per_token": row.kept_bytes / tokens} for row in trace.rows()],
        "totals": {
            "none": {"bytes": trace.none_bytes, "replay_flops": 0},
            "full": {"bytes": trace.input_bytes, "replay_flops": trace.full_flops},
            "this policy": {"bytes": trace.input_bytes + trace.kept_bytes, "replay_flops": trace.replay_flops},
        },
        "forward_flops": trace.forward_flops,
    }
