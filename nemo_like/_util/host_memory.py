"""Memory of the host that a process may take: the machine's, or less where control groups bound it."""

from __future__ import annotations

import os
from pathlib import Path

_LEFT = 10
"""One part in so many is left to everything else on the host."""


def host_bytes(ranks: int, groups: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes of CPU memory for each of the `ranks` of this host.

    That is an equal share of nine tenths of what the host has, or of what the control groups of this process may have
    (containers, Slurm), if that is less.

    groups, process: where Linux shows control groups, and which of them this process is in; files that are not there bound
    nothing.
    """
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([size, *_limits(groups, process)]) * (_LEFT - 1) // _LEFT // ranks


def _limits(groups: Path, process: Path) -> list[int]:
    """Return the limits of the process's group and of those above it, of both versions of control groups."""
    limits = []
    for line in _text(process).splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory") and "memory" not in kinds.split(","):
            continue
        top, name = (groups / "memory", "memory.limit_in_bytes") if kinds else (groups, "memory.max")
        inner = Path(path.lstrip("/"))
        limits += [_text(top / folder / name).strip() for folder in (inner, *inner.parents)]
    return [int(limit) for limit in limits if limit.isdigit()]  # "max": as much as there is


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
