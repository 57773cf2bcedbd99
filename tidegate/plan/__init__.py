"""Plans: what a step will do, as data."""

from tidegate.plan.ops import Op, OpKind, Subgroup, effects
from tidegate.plan.placement import place, steady
from tidegate.plan.plan import Placement, Plan, Policy
from tidegate.plan.planner import make_plan
from tidegate.plan.schedule import Clock
from tidegate.plan.tasks import Order
from tidegate.plan.verify import verify

__all__ = [
    "Clock",
    "Op",
    "OpKind",
    "Order",
    "Placement",
    "Plan",
    "Policy",
    "Subgroup",
    "effects",
    "make_plan",
    "place",
    "steady",
    "verify",
]
