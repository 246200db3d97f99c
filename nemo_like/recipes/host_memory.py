"""How much host memory a rank may take."""

from __future__ import annotations

import os
from pathlib import Path

from nemo_like.distributed.launch import local_world_size

_LEFT = 10
"""One part in so many is left to everything else on the host."""


def host_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of host memory for each rank of this host: an equal share of nine tenths of what the host has, or of what the
    control groups of this process may have (containers, Slurm), if that is less.

    groups, own: where Linux shows control groups, and which of them this process is in; files that are not there bound
    nothing.
    """
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = min([size, *_limits(groups, own)])
    return size * (_LEFT - 1) // _LEFT // local_world_size()


def _limits(groups: Path, own: Path) -> list[int]:
    """What the process's group and those above it may have, of both versions of control groups."""
    found = []
    for line in _text(own).splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory") and "memory" not in kinds.split(","):
            continue
        top, name = (groups / "memory", "memory.limit_in_bytes") if kinds else (groups, "memory.max")
        inner = Path(path.lstrip("/"))
        found += [_text(top / folder / name).strip() for folder in (inner, *inner.parents)]
    return [int(limit) for limit in found if limit.isdigit()]  # "max": as much as there is


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
