from nemo_like.activation_checkpointing.plan import LayerPlan as LayerPlan
from nemo_like.activation_checkpointing.plan import Plan as Plan
from nemo_like.activation_checkpointing.plan import PlanError as PlanError
from nemo_like.planning.planner import BudgetError as BudgetError
from nemo_like.planning.planner import apply_plan as apply_plan
from nemo_like.planning.planner import plan_for as plan_for
