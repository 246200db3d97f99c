"""The errors of the eager engine. All of them name the region."""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError


class RegionError(CheckpointError):
    """Replay and forward of a region disagree, or a plan leaves out what backward needs."""
