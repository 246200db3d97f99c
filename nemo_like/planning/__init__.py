"""Planning: what to keep of each layer for a memory budget, and what a training step will peak at, without a GPU."""

from nemo_like.activation_checkpointing.plan import LayerPlan, Plan, PlanError
from nemo_like.planning.apply_plan import apply_plan
from nemo_like.planning.planner import BudgetError, Planner, plan_for
from nemo_like.planning.stage_plans import plan_pipeline
from nemo_like.planning.stages import PipelinePlanner

__all__ = [
    "BudgetError", "LayerPlan", "PipelinePlanner", "Plan", "PlanError", "Planner", "apply_plan", "plan_for",
    "plan_pipeline",
]  # fmt: skip
