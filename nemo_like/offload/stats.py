"""What an offloader did, in counted bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class OffloadStats:
    """Live counters of one offloader. All sizes in bytes; they only grow, except the two marked "now"."""

    moved_bytes: int = 0
    """Copied to the host."""
    reloaded_bytes: int = 0
    """Copied back."""
    copies: int = 0
    """Copies to the host that were started."""
    reloads: int = 0
    """Copies back that were started."""
    prefetched: int = 0
    """Of those, started before backward asked."""
    shared: int = 0
    """Saved tensors whose bytes were on the host already, through another view of the same storage."""
    still_on_device: int = 0
    """Times backward found the original still alive on the device and no copy was needed."""
    offload_stalls: int = 0
    """Times forward waited because ``max_inflight_bytes`` were on their way to the host."""
    reload_stalls: int = 0
    """Times backward asked for bytes that were not on the device yet."""
    kept_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of saved tensors left on the device, by reason (a storage saved twice counts twice)."""
    kept_count: Counter[str] = field(default_factory=Counter)
    """Saved tensors left on the device, by reason."""
    host_live_bytes: int = 0
    """Now: host bytes that saved tensors occupy."""
    host_reserved_bytes: int = 0
    """Now: host bytes of all slabs."""
    host_peak_live_bytes: int = 0
    host_peak_reserved_bytes: int = 0

    def keep(self, reason: str, nbytes: int) -> None:
        """Count a tensor that stays on the device."""
        self.kept_bytes[reason] += nbytes
        self.kept_count[reason] += 1

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for a log or a table."""
        return asdict(self) | {"kept_bytes": dict(self.kept_bytes), "kept_count": dict(self.kept_count)}
