"""Lanes that share resources by capacity: a disk, cores, what host memory moves.

Several ranks of a node may run at once. Shares are fair by dominant resource (Ghodsi et al., "Dominant Resource
Fairness", NSDI '11): what an op gets of the resource that it needs most of grows equally for all, until that resource
is full or the op runs at the speed that it has alone. Half a node with half the ranks so does what the whole one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from tidegate.plan.ops import Op
from tidegate.plan.plan import Plan
from tidegate.simulator.event_loop import Times, times_together

Demand = Mapping[str, float]
"""Share of each resource that an op takes at full speed. Above 1: it cannot have full speed even alone."""
Name = TypeVar("Name", bound=Hashable)


def fair_speeds(demands: Mapping[Name, Demand]) -> dict[Name, float]:
    """Speed of each op that is at work: above 0 and up to 1, its speed with all resources to itself."""
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
    """When each op of each rank's plan starts and ends. Equal inputs give equal times.

    seconds: what an op takes at full speed. demand: what it then takes of each resource that ops share. gate: its
    earliest start. PlanError when a plan deadlocks.
    """
    return times_together(
        plans, seconds, gate, lambda at_work: fair_speeds({lane: demand(op) for lane, op in at_work.items()})
    )
