"""Plans: a plan is the immutable list of the ops of one step. This package makes plans and verifies them."""

from tidegate.plan.ops import Op, OpKind, Subgroup, effects
from tidegate.plan.placement import place_subgroups, steady_placements
from tidegate.plan.plan import Placement, Plan, Policy
from tidegate.plan.planner import make_plan
from tidegate.plan.schedule import OpTimes
from tidegate.plan.tasks import StepOrder
from tidegate.plan.verify import verify

__all__ = [
    "Op",
    "OpKind",
    "OpTimes",
    "Placement",
    "Plan",
    "Policy",
    "StepOrder",
    "Subgroup",
    "effects",
    "make_plan",
    "place_subgroups",
    "steady_placements",
    "verify",
]
