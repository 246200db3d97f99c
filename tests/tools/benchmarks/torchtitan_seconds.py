"""How long one of torchtitan's layers takes in our model of seconds, with what it sends inside.

What differs from `nemo_like.planning.answers.seconds`, after its files and PyTorch's:

- ``Float8ColwiseParallel`` and ``PrepareFloat8ModuleInput`` of torchao cast before they gather: gathers send one byte for
  each value, also of gradients behind a rowwise product, and a rank casts its own part. What is summed stays in 16 bits.
- With asynchronous tensor parallelism each gather and each sum runs beside the product that it belongs to, in as many pieces
  as there are ranks: what shows is the longer of the two and a piece of the shorter.
- Context parallelism (``torch.distributed.tensor.experimental``) deals two chunks of the sequence to each rank, so that all
  have the same share of a causal mask. Keys and values, repeated for all heads before, are gathered at once; in backward
  their gradients go round in float32, as often as there are ranks. Run eagerly, what is gathered arrives while a rank
  attends to its own keys. Where ``torch.compile`` takes the layers, as in all their rows with ``cp``, nothing of that runs
  beside attention: while it traces, functional collectives wait for themselves at once (``_maybe_wrap_tensor``). What blocks
  return is added up in float32 (``_SDPAMerger``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_like.activation_checkpointing.ops import facts
from nemo_like.planning import roofline
from nemo_like.planning.answers.seconds import Links
from nemo_like.planning.choose.layer import BlockProblem, Choice
from nemo_like.planning.choose.layer_seconds import ATTENTION_BACKWARD, BlockSeconds, backward_times, records_of
from nemo_like.planning.devices import Device
from nemo_like.planning.trace.block import OpRecord

_SENT = "_c10d_functional"
_GATHER = "all_gather_into_tensor"


@dataclass(frozen=True)
class HowRun:
    """What of a row changes how long a layer takes."""

    compiled: bool
    fp8_flops: float
    """FLOP/s of products in 8 bits; 0: they are in 16."""
    async_tp: bool
    tp: int
    cp: int


@dataclass(frozen=True)
class LayerSeconds:
    """One call of a layer; `sums` and `ring` are what shows of what it sends, `replay` has those of replay."""

    forward: float
    backward: float
    replay: float
    sums_forward: float = 0.0
    sums_backward: float = 0.0
    ring_forward: float = 0.0
    ring_backward: float = 0.0

    @property
    def whole_forward(self) -> float:
        return self.forward + self.sums_forward + self.ring_forward

    @property
    def whole_backward(self) -> float:
        return self.backward + self.replay + self.sums_backward + self.ring_backward


def layer_seconds(problem: BlockProblem, choice: Choice, how: HowRun, links: Links) -> LayerSeconds:
    """Of a block traced with one rank's tokens and weights."""
    device = links.device
    records = records_of(problem, compiled=how.compiled)
    plain = BlockSeconds.of(problem, compiled=how.compiled, fp8_flops=how.fp8_flops).kernels
    kernels = [_kernel(records, k, seconds, how, device) for k, seconds in enumerate(plain)]
    run = [
        k for k, word in enumerate(choice.decisions) if word == "recompute" and k < problem.reachable
    ]  # of "none" nothing
    sums = {
        k: _shown(records, kernels, k, how, links, backward=False) for k in range(len(records)) if _is_sent(records[k])
    }
    back = sum(_shown(records, kernels, k, how, links, backward=True) for k in sums)
    attention = next((k for k, op in enumerate(records) if facts(op.op).attention), None)
    ring = [0.0, 0.0] if attention is None else _ring(records[attention], kernels[attention] / how.cp, how, links)
    again = sum(kernels[k] for k in run) + sum(sums.get(k, 0.0) for k in run) + (ring[0] if attention in run else 0.0)
    return LayerSeconds(
        sum(kernels),
        sum(s * backward_times(op) for s, op in zip(kernels, records)),
        again,
        sum(sums.values()),
        back,
        ring[0],
        ring[1],
    )


def _kernel(records: Sequence[OpRecord], k: int, seconds: float, how: HowRun, device: Device) -> float:
    op = records[k]
    if _is_sent(op):
        return 0.0
    if facts(op.op).attention:
        return seconds * how.cp  # blocks of the other ranks' keys, half of each seen: as much as the own one
    if how.fp8_flops and op.flops and op.half and _reads_gathered(records, k):
        # What is gathered was cast before, by each rank its part.
        inputs = op.moved - op.bytes
        return seconds - inputs * (1 - 1 / how.tp) / device.bandwidth
    return seconds


def _is_sent(op: OpRecord) -> bool:
    return op.op.namespace == _SENT


def _reads_gathered(records: Sequence[OpRecord], k: int) -> bool:
    """Whether the last thing that was sent before the product `k` was gathered, with products alone in between."""
    for op in reversed(records[:k]):
        if _is_sent(op):
            return _GATHER in str(op.op)
        if facts(op.op).attention:
            return False
    return False


def _shown(
    records: Sequence[OpRecord], kernels: Sequence[float], k: int, how: HowRun, links: Links, *, backward: bool
) -> float:
    """What shows of the collective `k`, or of the one that backward has in its place (the other way round)."""
    op = records[k]
    gathers = _GATHER in str(op.op)
    whole = op.bytes if gathers else op.bytes * how.tp
    narrow = how.fp8_flops and gathers is not backward  # what backward has for a sum is a gather
    sending = roofline.gather_seconds(whole // 2 if narrow else whole, links.tensor, links.device)
    if not how.async_tp:
        return sending
    computing = sum(kernels[i] for i in _products_beside(records, k, gathers))
    return max(0.0, sending - computing) + min(sending, computing) / how.tp


def _products_beside(records: Sequence[OpRecord], k: int, behind: bool) -> list[int]:
    """The products that read what is gathered, up to attention or the next collective; or the one that is summed up."""
    found = []
    for i in range(k + 1, len(records)) if behind else range(k - 1, -1, -1):
        op = records[i]
        if _is_sent(op) or facts(op.op).attention:
            break
        if op.flops:
            found.append(i)
            if not behind:
                break
    # The last product of an MLP is the sum's, not the gather's.
    return found[:-1] if behind and len(found) == 3 and found[-1] == _last_product(records) else found


def _last_product(records: Sequence[OpRecord]) -> int:
    return max(k for k, op in enumerate(records) if op.flops and not facts(op.op).attention)


def _ring(attention: OpRecord, block: float, how: HowRun, links: Links) -> list[float]:
    """What shows of the ring, forward and backward; `block`: seconds of attention to the own keys."""
    if how.cp == 1:
        return [0.0, 0.0]
    states = 2 * attention.bytes  # keys and values; each as large as the output, whose heads they are repeated for
    arriving = roofline.gather_seconds(states * how.cp, links.sequence, links.device)
    step = roofline.send_seconds(2 * states, links.sequence.hosts == 1, links.device)  # gradients, in float32
    added_up, added_back = (passes * states / links.device.bandwidth for passes in _passes(how.cp))
    if how.compiled:
        return [arriving + added_up, arriving + how.cp * step + added_back]
    back = block * ATTENTION_BACKWARD
    return [
        max(0.0, arriving - block) + added_up,
        max(0.0, arriving - back) + (how.cp - 1) * max(0.0, step - back) + step + added_back,
    ]


def _passes(cp: int) -> tuple[float, float]:
    """How often a rank reads or writes as many bytes as its keys and values have, beside attention itself, if each sum is
    one kernel; forward and backward. `states` bytes are those of an output or a query in float32, too.

    Forward: keys and values are put side by side (2); the first block's output is cast (1.5); each later one is added to
    the sum (2.5: both read, the sum written), which is cast in the end (1.5). Backward: keys and values again (2); for each
    block the sums for keys and values (5: they are twice as large in float32) and for queries (2.5), and copies of output
    and its gradient for the kernel (2); in the end all three are cast (4.5).
    """
    return 2 + 1.5 + 2.5 * (cp - 1) + 1.5, 2 + 9.5 * cp + 4.5
