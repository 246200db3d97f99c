"""Bytes of a GPU that torch's caching allocator neither has nor counts: the CUDA context, and NCCL's buffers.

No number here was measured by this package. Those of NCCL are from its logs and issues:

- https://github.com/NVIDIA/nccl/issues/964: 4 A100 with NVLink; a group takes 544 MiB for 2 ranks, 688 for more. That is
  24 channels of 12 and 18 MiB, and 256 MiB besides: a ring's buffers, those of a tree's end, and a rest that is fitted.
- https://github.com/NVIDIA/nccl/issues/1685: 8 H100; buffers are of 10 and 2 MiB, since a connection has 4 MiB (Simple),
  4.7 (LL128) and 0.5 (LL), rounded to 2 MiB. The first all-to-all over 32 channels and 7 peers takes 3.28 GB: 14 MiB each.
- https://github.com/NVIDIA/nccl/issues/1450: between hosts, sends and receives share one buffer. Rings do not.
- NCCL's ``nvls.cc`` and logs: 32 MiB per GPU of a host for sums within NVSwitch, on Hopper and later. An earlier NCCL took
  288: https://github.com/vllm-project/vllm/issues/9699.
- A log of p5.48xlarge in aws-samples/aws-do-eks (NCCL tests): 24 channels, 32 per peer on one host; on two, 16 and 2.

Assumptions: 4 channels, 2 per peer, without NVLink; 20 MiB for a ring's channel from host to host; at most 8 GPUs count as
near, in a rack, too; the default group is used like any other; RCCL takes what NCCL does.

cuBLAS's workspaces are inside: torch takes them from its allocator (`nemo_like.planning.predictions.reserved`). No part of
this package captures a CUDA graph, so graphs' pools are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nemo_like._util.table import ByteUnit, byte_word
from nemo_like._util.words import MIB
from nemo_like.job import Job
from nemo_like.planning.devices import MARGIN, Device, step_limit
from nemo_like.planning.predictions.seconds import Links
from nemo_like.planning.roofline import RankGroup, group_of

CONTEXT, NCCL = "CUDA context", "NCCL"
_NVLINK = 100e9
"""Bytes per second above which GPUs of a host are taken to have NVLink."""


@dataclass(frozen=True)
class Outside:
    """Bytes that one GPU has outside of torch's allocator."""

    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes by part; empty: the device has no such allocator."""
    memory: int = 0
    """Bytes of the device."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fraction(self) -> float | None:
        """Share of the device that leaves them room, rounded down to two decimals; None: nothing is outside."""
        return max(0, 100 * (self.memory - self.total) // self.memory) / 100 if self.total else None

    def words(self) -> str:
        """Return the parts, and the call that leaves them room, in a sentence; empty where nothing is outside."""
        if self.fraction is None:
            return ""
        unit = ByteUnit.for_sizes([self.total])
        parts = ", ".join(f"{name} {unit.number(size)}" for name, size in self.parts.items() if size)
        return (
            f"Of the GPU's {byte_word(self.memory)}, {unit.word(self.total)} are outside of torch's "
            f"allocator ({parts}); torch.cuda.set_per_process_memory_fraction({self.fraction:.2f}) leaves them room. By "
            f"default {100 * MARGIN:.0f} % stay free, because predictions are off; --memory changes it."
        )


def outside_of(job: Job, device: Device) -> Outside:
    """Return the bytes that a rank of `job` has outside of the allocator, with those of its device."""
    return Outside(outside_bytes(job, device), device.memory_bytes)


def outside_bytes(job: Job, device: Device) -> dict[str, int]:
    """Return the bytes that a rank of `job` has outside of the allocator, by part; empty on a CPU."""
    if device.cuda is None:
        return {}
    return {CONTEXT: device.context_bytes, NCCL: sum(_communicators(job, device))}


def default_limit(job: Job, device: Device) -> int:
    """Return the bytes that a step of `job` may take by default: all but those outside of the allocator, and a margin."""
    return max(1, step_limit(device) - sum(outside_bytes(job, device).values()))


def _communicators(job: Job, device: Device) -> Iterator[int]:
    """Yield the bytes of each communicator; all ranks have one, which an axis of all ranks shares."""
    if job.is_single:
        return
    links, host = Links.for_job(job, device), device.gpus_per_host
    exchanging = {"all_gather": 0, "ring": 2, "ulysses": job.cp.size}[job.cp.method]
    stages = group_of(job.pp.size, job.ranks // job.pp.size, host)
    axes = [
        (links.shards, 0, True),
        (links.replicas, 0, True),
        (links.tensor, 0, True),
        (links.sequence, exchanging, not exchanging),
        (links.experts, job.ep.size, False),
        (links.expert_shards if job.ep.size > 1 else RankGroup(1, 1), 0, True),
        (stages, 2, False),
    ]
    if all(group.ranks < job.ranks for group, _, _ in axes):
        axes.append((group_of(job.ranks, 1, host), 0, True))
    yield from (communicator_bytes(*axis, device) for axis in axes if axis[0].ranks > 1)


def communicator_bytes(group: RankGroup, peers: int, collects: bool, device: Device) -> int:
    """Return the bytes that NCCL takes on a rank for one communicator.

    Args:
        peers: ranks that it sends to one by one; only those on its host have buffers of their own.
        collects: it gathers, scatters or sums, over rings and trees.
    """
    fast, near = device.nvlink >= _NVLINK, min(group.per_host, 8)
    channels, pairs = ((24, 32) if group.hosts == 1 else (16, 2)) if fast else (4, 2)
    size = 256 * channels // 24 + min(peers, near - 1) * pairs * 14
    if collects:
        size += channels * (20 if near == 1 else 12 if group.ranks == 2 else 18)
        size += 32 * near if fast and near > 2 and device.capability >= (9, 0) else 0
    return size * MIB
