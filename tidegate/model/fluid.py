"""Runs plans in virtual time where ops share resources by capacity: a disk, cores, what host memory moves.

Several ranks of a node may run at once. Shares are fair by dominant resource (Ghodsi et al., "Dominant Resource
Fairness", NSDI '11): what an op gets of the resource that it needs most of grows equally for all, until that resource
is full or the op runs at the speed that it has alone. Half a node with half the ranks so does what the whole one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tidegate.errors import PlanError
from tidegate.model.contention import Times
from tidegate.plan.ops import Op
from tidegate.plan.plan import Plan

Demand = Mapping[str, float]
"""Share of each resource that an op takes at full speed. Above 1: it cannot have full speed even alone."""
Name = TypeVar("Name", bound=Hashable)
_Lane = tuple[int, str]
"""Rank and name."""


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


@dataclass
class _Node:
    """What each lane of each rank works at: the op, and the seconds that are left of it at full speed."""

    plans: Sequence[Plan]
    seconds: Callable[[Op], float]
    demand: Callable[[Op], Demand]
    gate: Callable[[Op], float]
    waiting: dict[_Lane, list[Op]] = field(init=False)
    at_work: dict[_Lane, tuple[Op, float]] = field(default_factory=dict)
    starts: list[Times] = field(init=False)
    ends: list[Times] = field(init=False)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.waiting = {
            (rank, lane): list(reversed(ops))
            for rank, plan in enumerate(self.plans)
            for lane, ops in plan.lanes.items()
            if ops
        }
        self.starts, self.ends = [{} for _ in self.plans], [{} for _ in self.plans]

    def start(self) -> float:
        """Starts what can start now. Returns when the first gate opens that alone holds something up."""
        opens = math.inf
        for lane, ops in self.waiting.items():
            rank = lane[0]
            if lane in self.at_work or not ops or any(dep not in self.ends[rank] for dep in ops[-1].deps):
                continue
            if (gate := self.gate(ops[-1])) > self.now:
                opens = min(opens, gate)
                continue
            op = ops.pop()
            self.starts[rank][op.id] = self.now
            self.at_work[lane] = (op, self.seconds(op))
        return opens

    def advance(self, opens: float) -> None:
        """On to the end of the op that ends first, or to `opens`."""
        speeds = fair_speeds({lane: self.demand(op) for lane, (op, _) in self.at_work.items()})
        left = {lane: alone / speeds[lane] for lane, (_, alone) in self.at_work.items()}
        first = min(left, key=lambda lane: left[lane], default=None)
        if first is None or self.now + left[first] > opens:
            elapsed, self.now, first = opens - self.now, opens, None
        else:
            elapsed = left[first]
            self.now += elapsed
        for lane, (op, alone) in self.at_work.items():
            self.at_work[lane] = (op, max(0.0, alone - elapsed * speeds[lane]))
        if first is not None:
            self.ends[first[0]][self.at_work.pop(first)[0].id] = self.now


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
    node = _Node(plans, seconds, demand, gate)
    left = sum(len(plan.ops) for plan in plans)
    while sum(map(len, node.ends)) < left:
        opens = node.start()
        if not node.at_work and opens == math.inf:
            stuck = next(ops[-1] for ops in node.waiting.values() if ops)
            raise PlanError(
                f"Nothing can run and op {stuck.id} ({stuck.name}) still waits: the plan deadlocks.", "deadlock"
            )
        node.advance(opens)
    return list(zip(node.starts, node.ends, strict=True))
