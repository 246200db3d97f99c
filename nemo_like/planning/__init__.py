"""Planning: what to keep of each layer for a memory budget, and what a training step will peak at, without a GPU.

Names are imported when they are asked for: a job without a budget runs nothing of this folder but the check of a split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_like._util.lazy import lazy_names

if TYPE_CHECKING:
    from nemo_like.activation_checkpointing.plan import LayerPlan, Plan, PlanError
    from nemo_like.planning.planner import BudgetError, apply_plan, plan_for

_MODULES = {
    "BudgetError": "nemo_like.planning.planner",
    "LayerPlan": "nemo_like.activation_checkpointing.plan",
    "Plan": "nemo_like.activation_checkpointing.plan",
    "PlanError": "nemo_like.activation_checkpointing.plan",
    "apply_plan": "nemo_like.planning.planner",
    "plan_for": "nemo_like.planning.planner",
}

__all__ = sorted(_MODULES)
__getattr__ = lazy_names(__name__, _MODULES)
