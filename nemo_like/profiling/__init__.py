"""Measured bytes and time per layer, and which layers to recompute for a budget. Needs torch alone."""

from nemo_like.profiling.profile_report import LayerProfile, ProfileReport
from nemo_like.profiling.profiler import BudgetUnmeetableError, MemoryProfiler

__all__ = [
    "BudgetUnmeetableError",
    "LayerProfile",
    "MemoryProfiler",
    "ProfileReport",
]
