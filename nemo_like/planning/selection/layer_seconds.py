"""Seconds of the kernels of a layer, and bytes that it sends.

Backward of attention is two and a half times a forward (five products for two); of a matrix product, one product for each
input that needs a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nemo_like.activation_checkpointing.ops import facts
from nemo_like.planning.roofline import is_sequence_op, kernel_kind, kernel_seconds
from nemo_like.planning.selection.layer import BlockProblem, Choice
from nemo_like.planning.sharding import UnitBytes
from nemo_like.planning.trace.block import OpRecord

ATTENTION_BACKWARD, OTHER_BACKWARD = 2.5, 2.0
"""Backward as a multiple of forward: of attention, and of what is neither that nor a matrix product."""


def backward_times(op: OpRecord) -> float:
    """Return the seconds of an operator's backward, as a multiple of its forward: a matrix product has one more product for
    each input that needs a gradient."""
    if not op.grads:
        return 0.0
    if facts(op.op).attention:
        return ATTENTION_BACKWARD
    return float(min(2, op.grads)) if op.flops else OTHER_BACKWARD


_GATHER, _SCATTER = "_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor"
_NOT_OF_SEQUENCES = ("nemo_like::route", "nemo_like::rows_of_all")


def _whole(gather: OpRecord) -> int:
    """Return the bytes that a gather makes; a trace has none of a tensor in float8, which has one for each value."""
    return gather.bytes or sum(map(math.prod, gather.shapes))


def _summed(records: Sequence[OpRecord], hidden: int) -> int:
    """Return the bytes that ranks of ``tp`` sum up in a forward, behind attention and behind the FFN.

    A gather, or a reduce-scatter, takes half the time of a sum. `hidden`: bytes of the hidden states, as of each of the two
    sums that the trace does not have: that of experts that are split inside is in place.
    """
    sums = [op.bytes for op in records if op.op.name() == "_c10d_functional::all_reduce"]
    gathered = (_GATHER, "nemo_like::rows_of_all")
    sums += [_whole(op) // 2 for op in records if op.op.name() in gathered]
    # A rank gives all of what is reduced and scattered, and gets its part.
    sums += [(op.moved - op.bytes) // 2 for op in records if op.op.name() == _SCATTER]
    return sum(sums) + max(0, 2 - len(sums)) * hidden


def _pieces(records: Sequence[OpRecord], kernels: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Return whole bytes of each gather and reduce-scatter of sequences, and the seconds of the matmuls that it can run
    beside: those that read what is gathered, up to attention, the next collective or the last product of an MLP, or the one
    that makes what is scattered."""
    last = max((k for k, op in enumerate(records) if op.flops and not facts(op.op).attention), default=0)
    found = []
    for k, op in enumerate(records):
        gathers = op.op.name() == _GATHER
        if not gathers and op.op.name() != _SCATTER:
            continue
        beside = 0.0
        for i in range(k + 1, len(records)) if gathers else range(k - 1, -1, -1):
            other = facts(records[i].op)
            if other.attention or other.collective or (gathers and i == last):
                break
            if records[i].flops:
                beside += kernels[i]
                if not gathers:
                    break
        found.append((_whole(op) if gathers else op.moved - op.bytes, beside))
    return tuple(found)


def fused(ops: Sequence[OpRecord]) -> tuple[OpRecord, ...]:
    """The operators of a trace as a compiler fuses them, where no matrix product, attention or collective stands between
    two.

    What is computed twice is computed once. A value goes to memory where something outside of its row reads it, or backward;
    a row reads each value once.
    """
    row, rows, first = 0, list[int](), list[int]()
    for place, op in enumerate(ops):
        heavy = bool(op.flops) or facts(op.op).attention or facts(op.op).collective
        rows.append(row + heavy)
        row += 2 * heavy
        first.append(place if op.twin is None or heavy else first[op.twin])
    reads = [
        {first[number] for number in (*op.reads, *op.values) if first[place] == place} for place, op in enumerate(ops)
    ]
    outside = {number for place in range(len(ops)) for number in reads[place] if rows[number] != rows[place]}
    for place in reversed(range(len(ops))):
        if place in outside and not ops[place].moved:  # the same values under another name
            outside |= reads[place]
    read, needed = set[int]().union(*reads), {first[place] for place, op in enumerate(ops) if op.needed}
    made, known, seen = list[OpRecord](), set[tuple[int, int]](), set[tuple[int, int]]()
    for place, op in enumerate(ops):
        if rows[place] % 2 or not op.moved:
            made.append(op)
            continue
        if first[place] != place:
            made.append(replace(op, moved=0))
            continue
        here = {number for number in reads[place] if rows[number] == rows[place] or (rows[place], number) in known}
        known |= {(rows[place], number) for number in reads[place]}
        again = sum(ops[number].bytes for number in here)
        again += sum(size for number, size in op.outer if (rows[place], number) in seen)
        seen |= {(rows[place], number) for number, _ in op.outer}
        incoming = max(0, op.moved - op.bytes - again)
        leaves = place in needed or place in outside or place not in read
        made.append(replace(op, moved=incoming + (op.bytes if leaves else 0)))
    return tuple(made)


def records_of(problem: BlockProblem, *, compiled: bool) -> tuple[OpRecord, ...]:
    """Return the operators of a block that compute something, as they run."""
    return tuple(op for op in fused(problem.trace.ops) if not op.view) if compiled else problem.records


@dataclass(frozen=True)
class BlockSeconds:
    """One kind of layer in one local shape: seconds of its kernels, and bytes that it sends."""

    kernels: tuple[float, ...]
    """Seconds of each of `BlockProblem.records`, forward."""
    forward: float
    backward: float
    sequence_bytes: int
    """Gathered over ``cp`` in a forward."""
    gathered_again: int
    """Bytes of these that backward gathers once more."""
    expert_bytes: int
    """Sent by all-to-all over ``ep`` in a forward."""
    boundary_bytes: int
    """Bytes of one sum of tensor parallelism: the mean of that behind attention and that behind the FFN.

    Without such a sum in the trace, those of the hidden states; half of them for what is gathered alone, as rows of experts.
    """
    kinds: tuple[str, ...] = ()
    """Kind of each of `kernels`: ``launch`` where that is what it takes, else its `kernel_kind`."""
    backward_times: tuple[float, ...] = ()
    """For each of `kernels`, its backward as a multiple of it."""
    launched: int = 0
    """Operators of a forward that the host launches one by one, views included: none of a compiled layer."""
    products: int = 0
    """Matrix products among these."""
    pieces: tuple[tuple[int, float], ...] = ()
    """Bytes of each collective of sequence parallelism in a forward, and seconds of matmuls that it can run beside."""

    @classmethod
    def from_problem(cls, problem: BlockProblem, *, compiled: bool = False) -> BlockSeconds:
        """Return the seconds of a traced block at the rates of its device.

        compiled: operators between matrix products are `fused`.
        """
        records, device = records_of(problem, compiled=compiled), problem.device
        kernels = problem.measured or tuple(kernel_seconds(op, device) for op in records)
        times = tuple(map(backward_times, records))
        back = sum(seconds * more for seconds, more in zip(kernels, times))
        again = sum(op.gathered for op in records)
        return cls(
            kernels,
            sum(kernels),
            back if problem.trace.saves_something else 0.0,
            sum(op.bytes for op in records if is_sequence_op(op) and op.op.name() not in _NOT_OF_SEQUENCES) + again,
            again,
            sum(op.moved // 2 for op in records if facts(op.op).exchange),
            _summed(records, problem.trace.input_bytes) // 2,
            tuple(
                "launch" if seconds == device.launch_seconds else kernel_kind(op.op, op.flops)
                for seconds, op in zip(kernels, records)
            ),
            times,
            0 if compiled else len(problem.trace.ops),
            0 if compiled else sum(bool(op.flops) and not facts(op.op).attention for op in records),
            _pieces(records, kernels),
        )

    def replay(self, choice: Choice, reachable: int) -> float:
        """Kernels that backward runs again."""
        return sum(
            s
            for k, (s, word) in enumerate(zip(self.kernels, choice.decisions))
            if word == "recompute" and k < reachable
        )


@dataclass(frozen=True)
class LayerRun:
    """Equal calls of layers in one step."""

    count: int
    block: BlockSeconds
    replay: float
    """Seconds of kernels."""
    replays_exchanges: bool
    """Collectives inside are run again: where nothing inside is kept."""
    unit: UnitBytes | None
    experts: UnitBytes | None = None
    copies: float = 0.0
    """Seconds of copies of activations to the host that computing does not hide."""
    moved: int = 0
    """Bytes of activations that go to the host, and back beside backward."""
    kind: int = 0
    """The number of the kind of layer among those that were traced."""
    choice: Choice | None = None
