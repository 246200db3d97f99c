"""Planning: what to keep of each layer for a memory budget, and what a training step will peak at, without a GPU.

Names are imported when they are asked for: a job without a budget runs nothing of this folder but the trial of a split.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_like.activation_checkpointing.plan import LayerPlan, Plan, PlanError
    from nemo_like.planning.planner import BudgetError, Planner, apply_plan, plan_for
    from nemo_like.planning.stage_plans import plan_pipeline
    from nemo_like.planning.stages import PipelinePlanner

_MODULES = {
    "BudgetError": "planning.planner",
    "LayerPlan": "activation_checkpointing.plan",
    "PipelinePlanner": "planning.stages",
    "Plan": "activation_checkpointing.plan",
    "PlanError": "activation_checkpointing.plan",
    "Planner": "planning.planner",
    "apply_plan": "planning.planner",
    "plan_for": "planning.planner",
    "plan_pipeline": "planning.stage_plans",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'nemo_like.planning' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"nemo_like.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
