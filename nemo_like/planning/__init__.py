"""Planning: what to keep of each layer for a memory budget, and what a training step will peak at, without a GPU."""

from __future__ import annotations

import importlib
from typing import Any

from nemo_like.activation_checkpointing.plan import LayerPlan, Plan, PlanError
from nemo_like.planning.apply_plan import apply_plan
from nemo_like.planning.planner import BudgetError, Planner, plan_for
from nemo_like.planning.stage_plans import plan_pipeline
from nemo_like.planning.stages import PipelinePlanner

__all__ = [
    "BudgetError", "DryRun", "LayerPlan", "PipelinePlanner", "Plan", "PlanError", "Planner", "apply_plan", "dry_run",
    "plan_for", "plan_pipeline",
]  # fmt: skip

_ABOVE = ("DryRun", "dry_run")
"""What runs `parallelize`, which stands above planning: imported when it is asked for."""


def __getattr__(name: str) -> Any:
    if name not in _ABOVE:
        raise AttributeError(f"module 'nemo_like.planning' has no attribute {name!r}")
    return getattr(importlib.import_module("nemo_like.fake_rank"), name)
