"""Fair-share simulation: lanes of one or several ranks share resources such as a disk, cores or memory bandwidth.

Shares follow dominant resource fairness (Ghodsi et al., "Dominant Resource Fairness", NSDI '11): the share that an op
gets of its dominant resource (the resource of which it needs most) grows equally for all ops, until a resource is full
or the op runs at the speed that it has alone. So half of a node with half of its ranks gives the same result as the
whole node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from tidegate.plan.ops import Op
from tidegate.plan.plan import Plan
from tidegate.simulator.event_loop import Times, times_together

Demand = Mapping[str, float]
"""The share of each resource that an op uses at full speed. Above 1: the op cannot run at full speed even alone."""
Name = TypeVar("Name", bound=Hashable)


def fair_speeds(demands: Mapping[Name, Demand]) -> dict[Name, float]:
    """The speed of each op that is running: above 0 and up to 1; 1 is its speed with all resources to itself."""
    used: dict[str, float] = {}
    dominant = {name: max(demand.values(), default=0.0) for name, demand in demands.items()}
    speeds = {name: 1.0 for name in demands if dominant[name] <= 0}
    order = [name for name in demands if dominant[name] > 0]
    while order:
        wanted: dict[str, float] = {}
        for name in order:
            for resource, share in demands[name].items():
                wanted[resource] = wanted.get(resource, 0.0) + share / dominant[name]
        level, full = min(dominant[name] for name in order), ""
        for resource, slope in wanted.items():
            reach = max(0.0, 1.0 - used.get(resource, 0.0)) / slope if slope > 0 else math.inf
            if reach < level:
                level, full = reach, resource
        left: list[Name] = []
        for name in order:
            if not (demands[name].get(full, 0.0) > 0 if full else dominant[name] <= level):
                left.append(name)
                continue
            speeds[name] = level / dominant[name]
            for resource, share in demands[name].items():
                used[resource] = used.get(resource, 0.0) + share * speeds[name]
        order = left
    return speeds


def shared_times(
    plans: Sequence[Plan],
    seconds: Callable[[Op], float],
    demand: Callable[[Op], Demand],
    gate: Callable[[Op], float],
) -> list[tuple[Times, Times]]:
    """Start and end times of all ops, for each rank's plan. Equal inputs give equal times.

    seconds: gives the run time of an op at full speed. demand: gives its share of each resource at full speed. gate:
    gives its earliest start. PlanError when a plan deadlocks.
    """
    return times_together(
        plans, seconds, gate, lambda at_work: fair_speeds({lane: demand(op) for lane, op in at_work.items()})
    )
