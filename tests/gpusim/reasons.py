"""Reasons why branches of the package cannot run on the simulated device."""

from __future__ import annotations

REASONS: dict[tuple[str, str], str] = {}
"""The reason, by file and condition; `tests.gpusim.branches` shows it."""
