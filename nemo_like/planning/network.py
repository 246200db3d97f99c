"""How long collectives take: by bytes, by how many ranks sit on one host, and by the links between them.

A ring over `ranks` sends each byte over every link but one. Within a host that link is NVLink's; between hosts each rank of
the group brings its own network card, so that a group with many ranks on a host has more cards than one with a single rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.planning.devices import Device


@dataclass(frozen=True)
class RankGroup:
    """Ranks that exchange data."""

    ranks: int
    per_host: int
    """How many of them sit on one host."""

    @property
    def hosts(self) -> int:
        return max(1, self.ranks // max(1, self.per_host))


def group_of(ranks: int, inner: int, gpus_per_host: int) -> RankGroup:
    """An axis of `ranks`, inside of which are axes of `inner` ranks together: neighbours are `inner` apart.

    >>> group_of(32, 8, 8), group_of(4, 2, 8)
    (RankGroup(ranks=32, per_host=1), RankGroup(ranks=4, per_host=4))
    """
    return RankGroup(ranks, max(1, min(ranks, gpus_per_host // max(1, inner))))


def gather_seconds(size: int, group: RankGroup, device: Device) -> float:
    """An all-gather of `size` bytes in all on each rank; a reduce-scatter takes as long."""
    if group.ranks == 1 or not size:
        return 0.0
    share = size * (group.ranks - 1) / group.ranks
    if group.hosts == 1:
        return share / device.nvlink + device.hop_seconds * (group.ranks - 1)
    between = min(device.nvlink, device.network * group.per_host)
    # Rings over thousands of ranks are trees between hosts in practice: latency grows with the logarithm there.
    hops = group.per_host - 1 + 2 * max(1, (group.hosts - 1).bit_length())
    return share / between + device.hop_seconds * hops


def reduce_seconds(size: int, group: RankGroup, device: Device) -> float:
    """An all-reduce of `size` bytes: a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(size, group, device)


def exchange_seconds(size: int, group: RankGroup, device: Device) -> float:
    """An all-to-all in which each rank sends `size` bytes in all: what stays on the host goes over its links beside what
    leaves it, each rank over its own card."""
    if group.ranks == 1 or not size:
        return 0.0
    inside = size * (group.per_host - 1) / group.ranks / device.nvlink
    outside = size * (group.ranks - group.per_host) / group.ranks / device.network
    return max(inside, outside) + device.hop_seconds * group.hosts.bit_length()


def send_seconds(size: int, same_host: bool, device: Device) -> float:
    """From one rank to the next."""
    return size / (device.nvlink if same_host else device.network) + device.hop_seconds
