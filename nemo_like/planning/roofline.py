"""Seconds of kernels, optimizers, copies and collectives by the rates of a device."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_like._util.log import say_once
from nemo_like._util.tensors import is_wrapped, tensors_in
from nemo_like.activation_checkpointing import ops
from nemo_like.fake.run import ALIASES
from nemo_like.losses.rows import REPEATS
from nemo_like.options.optimizers import OPTIMIZERS, TrainedParameter
from nemo_like.planning.devices import Device
from nemo_like.planning.trace.block import OpRecord
from nemo_like.planning.trace.records import Work
from nemo_like.torch_compat import DispatchMode

# Rows and columns of the output that one multiprocessor works on at a time, in the large products of cuBLAS and
# CUTLASS.
_TILE = (128, 256)


def op_seconds(op: OpRecord, device: Device) -> float:
    """Return the seconds of one operator: of its kernel, or of its sends to other ranks."""
    row = ops.facts(op.op)
    if op.view:
        return 0.0
    if row.exchange:
        # Half of its bytes are sent. A network card reaches the device over the bus to the host, so that bus bounds it.
        return op.moved / 2 / device.host_link
    if row.received is not None:
        return max(row.received(op.moved - op.bytes, op.bytes) / device.host_link, op.moved / device.bandwidth)
    return kernel_seconds(op, device)


def kernel_seconds(op: OpRecord, device: Device) -> float:
    """Return the seconds of one kernel; 0 for a view, and for sends (`nemo_like.planning.predictions.seconds`).

    The longer of its FLOPs at the device's reachable rate and its bytes at the reachable bandwidth (Williams et al.,
    "Roofline", CACM 2009), and at least a launch; casts of its inputs come before it.
    """
    op_facts = ops.facts(op.op)
    if op.view or op_facts.exchange or is_sequence_op(op):
        return 0.0
    is_product = op.flops and not op_facts.attention
    computing = product_seconds(op, device)[0] if is_product else op.flops / device.flops_of(op.op, half=op.half)
    casts = op_facts.casts * (op.moved - op.bytes) / device.bandwidth
    return casts + max(computing, op.moved / device.bandwidth, device.launch_seconds if op.moved else 0.0)


# An output is written after the last step of the inner dimension, and hardly hidden: the seconds of that as a multiple of
# its bytes over the bandwidth, by five dense FP8 products of 4,096 rows in the first README of DeepGEMM
# (https://github.com/deepseek-ai/DeepGEMM, H800): 590, 990, 1,025, 1,304 and 1,358 TFLOPS at inner dimensions of 512, 1,536,
# 2,048, 7,168 and 16,384. A device's rates are those at `RATED_INNER`, which the median of their source's shapes has.
_WRITE, RATED_INNER = 1.44, 8192


def product_seconds(op: OpRecord, device: Device) -> tuple[float, float, float]:
    """Return the seconds in which a matrix product computes: forward, the gradient of its input, that of its weight.

    It fills the processors in whole waves of tiles, so that one of few tiles is slower; but for a weight's gradient, whose
    inner dimension, the tokens, is split for that. The shorter its inner dimension, the more its output costs.
    """
    once = op.flops / device.flops_of(op.op, half=op.half)
    if not device.processors or not op.shapes or len(op.shapes[0]) < 2:
        return once, once, once
    rows, columns = math.prod(op.shapes[0][:-1]), op.shapes[0][-1]
    inner, size, groups = op.flops // (2 * rows * columns) or 1, 2 if op.half else 4, 1
    if ops.facts(op.op).flops is ops.grouped_mm:  # its weights are the rest of the bytes that it moves
        groups = max(1, round((op.moved / size - rows * (inner + columns)) / (inner * columns)))

    def seconds(written: int, inner: float, share: float) -> float:
        return once / share + _WRITE * written * size / device.bandwidth * max(0.0, 1 - inner / RATED_INNER)

    return (
        seconds(rows * columns, inner, wave_share([(rows, columns)], device.processors)),
        seconds(rows * inner, columns, wave_share([(rows, inner)], device.processors)),
        seconds(groups * inner * columns, rows / groups, 1.0),
    )


def wave_share(shapes: Sequence[tuple[int, ...]], processors: int) -> float:
    """Return the share of the device that a matrix product with such an output keeps busy: tiles in whole waves.

    >>> round(wave_share([(8192, 4096)], 132), 3), wave_share([(128, 256)], 132) < 0.01
    (0.97, True)
    """
    if not processors or not shapes or len(shapes[0]) < 2:
        return 1.0
    rows, columns = math.prod(shapes[0][:-1]), shapes[0][-1]
    tiles = -(-rows // _TILE[0]) * -(-columns // _TILE[1])
    return tiles / (-(-tiles // processors) * processors)


def is_sequence_op(op: OpRecord) -> bool:
    """Return whether an operator gathers or reduces parts of sequences over ``cp``, and does nothing else."""
    op_facts = ops.facts(op.op)
    return op.op.namespace == "nemo_like" and op_facts.collective and not op_facts.exchange and not op_facts.attention


class OpWork(DispatchMode):
    """Notes the work of the ops inside it, fake ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Work] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_wrapped(types):
            return NotImplemented
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(out)
        if inputs and not _views(func):
            half = any(t.is_floating_point() and t.element_size() == 2 for t in inputs + outputs)
            flops, moved = ops.kernel_flops(func, args, kwargs, out), ops.moved_bytes(func, inputs, outputs)
            self.work.append(Work(func, half, flops, moved, REPEATS.get()))
        return out


def work_seconds(work: Iterable[Work], device: Device) -> tuple[float, dict[str, float]]:
    """Return ``max(FLOPs / reachable FLOP/s, bytes moved / reachable bytes/s)`` of operators: of all, by `kernel_kind`."""
    total, kinds = 0.0, defaultdict[str, float](float)
    for op, half, flops, moved, times in work:
        seconds = max(flops / device.flops_of(op, half=half), moved / device.bandwidth) * times
        total += seconds
        kinds[kernel_kind(op, flops)] += seconds
    return total, dict(kinds)


def kernel_kind(op: Any, flops: int) -> str:
    """Return ``attention`` | ``matmul`` | ``memory-bound``: norms, elementwise, lookups."""
    return "attention" if ops.facts(op).attention else "matmul" if flops else "memory-bound"


def _views(func: Any) -> bool:
    """Return whether an operator returns its input, looked at otherwise: nothing is computed."""
    aliases = [result.alias_info for result in func._schema.returns]
    return func._schema.name in ALIASES or any(alias is not None and not alias.is_write for alias in aliases)


def optimizer_seconds(trained: Sequence[TrainedParameter], name: str, device: Device) -> float:
    """An optimizer step on one rank, as one kernel that is bound by memory: the least that it takes. Muon's products are
    not in it.

    Args:
        trained: the parameters.
        name: one of `nemo_like.options.OPTIMIZERS`.
        device: whose bandwidth counts.
    """
    return sum(param.size for param in trained) * OPTIMIZERS[name].passes / device.bandwidth


def host_optimizer_seconds(trained: Sequence[TrainedParameter], name: str, device: Device) -> float:
    """Return the seconds of an optimizer step over parameters in CPU memory, at this rank's share of the bandwidth there.

    Where that is not known, at the rate of the bus to it, which it is not below, and that is logged once.
    """
    if not trained:
        return 0.0
    rate = device.host_bandwidth
    if not rate:
        rate = device.host_link
        say_once(
            f"The bandwidth of CPU memory beside {device.name} is not known: the optimizer's step there is taken to "
            f"go at the rate of the bus, {rate / 1e9:g} GB/s."
        )
    facts = OPTIMIZERS[name]
    passes = facts.passes if facts.host_passes is None else facts.host_passes
    return sum(param.size for param in trained) * passes / rate


def exposed_seconds(moved: int, forward_seconds: float, device: Device) -> float:
    """Return the seconds of a block's copies to CPU memory and back that its own computing does not hide.

    The copy out runs during this block's forward, the copy back during its backward, which takes twice as long.
    """
    copy = moved / device.host_link
    return max(0.0, copy - forward_seconds) + max(0.0, copy - 2 * forward_seconds)


@dataclass(frozen=True)
class RankGroup:
    """Ranks that exchange data."""

    ranks: int
    per_node: int  # Ranks of the group on one node.

    @property
    def nodes(self) -> int:
        return max(1, self.ranks // max(1, self.per_node))


def group_of(ranks: int, inner: int, gpus_per_node: int) -> RankGroup:
    """An axis of `ranks`, inside of which are axes of `inner` ranks together: neighbours are `inner` apart.

    >>> group_of(32, 8, 8), group_of(4, 2, 8)
    (RankGroup(ranks=32, per_node=1), RankGroup(ranks=4, per_node=4))
    """
    return RankGroup(ranks, max(1, min(ranks, gpus_per_node // max(1, inner))))


def gather_seconds(size: int, group: RankGroup, device: Device) -> float:
    """An all-gather of `size` bytes in all on each rank; a reduce-scatter takes as long."""
    if group.ranks == 1 or not size:
        return 0.0
    share = size * (group.ranks - 1) / group.ranks
    if group.nodes == 1:
        return share / device.nvlink + device.hop_seconds * (group.ranks - 1)
    between = min(device.nvlink, device.network * group.per_node)
    # Rings over thousands of ranks are trees between nodes in practice: latency grows with the logarithm there.
    hops = group.per_node - 1 + 2 * max(1, (group.nodes - 1).bit_length())
    return share / between + device.hop_seconds * hops


def reduce_seconds(size: int, group: RankGroup, device: Device) -> float:
    """An all-reduce of `size` bytes: a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(size, group, device)


def exchange_seconds(size: int, group: RankGroup, device: Device) -> float:
    """Return the seconds of an all-to-all of `size` bytes of each rank: bytes within the host go over its links while
    the others go over each rank's own card."""
    if group.ranks == 1 or not size:
        return 0.0
    inside = size * (group.per_node - 1) / group.ranks / device.nvlink
    outside = size * (group.ranks - group.per_node) / group.ranks / device.network
    return max(inside, outside) + device.hop_seconds * group.nodes.bit_length()


# Seconds of the CPU thread that launches the kernels of a layer: where the GPU is faster, it waits.
#
# The rates are CPU time of that thread, measured by `tests.tools.benchmarks.host` on layers so small that their kernels take
# next to nothing (AMD EPYC, 2 cores, torch 2.13.0+cpu; docs/evidence/overhead.md), and halved: the CPU of a GPU node runs
# one thread about twice as fast. The half is an assumption.

_FASTER = 2.0  # Times the host of a GPU node is faster than the measuring machine: assumed.


def _rate(forward: float, backward: float) -> float:
    """Microseconds as measured, of a backward with its recomputation → seconds of a GPU node's host for both."""
    return (forward + backward) / _FASTER * 1e-6


# For each operator of a layer's forward, views included, by the region around it.
_ALONE = _rate(4.6, 5.8)
_FULL = _rate(9.0, 17.1)
_BY_OPERATOR = _rate(17.3, 26.7)
_UNIT = _rate(1_710, 2_010)  # FSDP2's hooks, copies and collectives of a layer, beside its operators.
# A linear that tensor parallelism splits: DTensor's dispatch and its share of the collectives.
_PRODUCT = _rate(380, 785)
# The same with sequence parallelism, which gathers and scatters instead of one sum.
_SEQUENCE_PRODUCT = _rate(654, 1_104)


def host_seconds(
    operators: int, label: str, *, units: int, split_products: int, sequence_parallel: bool = False
) -> float:
    """Return the seconds of the host in forward and backward of one layer call.

    Args:
        operators: that it launches one by one: of the forward, views included; 0: the layer is compiled.
        label: of its choice: ``none`` and ``full`` run without a look at each operator.
        units: FSDP2 units in it. split_products: linears that tensor parallelism splits.
        sequence_parallel: these gather and scatter sequences.
    """
    around = {"none": _ALONE, "full": _FULL}.get(label, _BY_OPERATOR)
    product = _SEQUENCE_PRODUCT if sequence_parallel else _PRODUCT
    return operators * around + units * _UNIT + split_products * product
