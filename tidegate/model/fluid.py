"""Runs a plan in virtual time where ops share resources by capacity: a disk, a memory bus, both ways of a link."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tidegate.errors import PlanError
from tidegate.model.contention import Times
from tidegate.plan.ops import Op
from tidegate.plan.plan import Plan

Demand = Mapping[str, float]
"""Share of each resource that an op takes at full speed. Above 1: it cannot have full speed even alone."""


def fair_speeds(demands: Mapping[str, Demand]) -> dict[str, float]:
    """Speed of each op that is at work, above 0 and up to 1 of its speed alone: max-min fair.

    All speeds rise together until a resource is full; what needs that one stays, the others go on. No speed can be
    raised without lowering one that is not higher.
    """
    speeds: dict[str, float] = {}
    used: dict[str, float] = {}
    rising = dict(demands)
    while rising:
        wanted: dict[str, float] = {}
        for demand in rising.values():
            for resource, share in demand.items():
                wanted[resource] = wanted.get(resource, 0.0) + share
        level, full = 1.0, ""
        for resource, share in wanted.items():
            reach = max(0.0, 1.0 - used.get(resource, 0.0)) / share if share > 0 else math.inf
            if reach < level:
                level, full = reach, resource
        stops = [name for name, demand in rising.items() if not full or demand.get(full, 0.0) > 0]
        for name in stops:
            speeds[name] = level
            for resource, share in rising.pop(name).items():
                used[resource] = used.get(resource, 0.0) + share * level
    return speeds


@dataclass
class _Machine:
    """What each lane works at: the op, and the seconds that are left of it at full speed."""

    plan: Plan
    demand: Callable[[Op], Demand]
    waiting: dict[str, list[Op]] = field(init=False)
    at_work: dict[str, tuple[Op, float]] = field(default_factory=dict)
    starts: Times = field(default_factory=dict)
    ends: Times = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.waiting = {lane: list(reversed(ops)) for lane, ops in self.plan.lanes.items() if ops}

    def start(self, seconds: Mapping[int, float], gates: Mapping[int, float]) -> float:
        """Starts what can start now. Returns when the first gate opens that alone holds something up."""
        opens = math.inf
        for lane, ops in self.waiting.items():
            if lane in self.at_work or not ops or any(dep not in self.ends for dep in ops[-1].deps):
                continue
            if (gate := gates.get(ops[-1].id, 0.0)) > self.now:
                opens = min(opens, gate)
                continue
            op = ops.pop()
            self.starts[op.id] = self.now
            self.at_work[lane] = (op, seconds[op.id])
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
            self.ends[self.at_work.pop(first)[0].id] = self.now


def shared_times(
    plan: Plan,
    seconds: Mapping[int, float],
    demand: Callable[[Op], Demand],
    gates: Mapping[int, float],
) -> tuple[Times, Times]:
    """When each op starts and ends. Equal inputs give equal times.

    seconds: what each op takes at full speed. gates: the earliest start of ops that have one. PlanError when the plan
    deadlocks.
    """
    machine = _Machine(plan, demand)
    while len(machine.ends) < len(plan.ops):
        opens = machine.start(seconds, gates)
        if not machine.at_work and opens == math.inf:
            stuck = next(ops[-1] for ops in machine.waiting.values() if ops)
            raise PlanError(
                f"Nothing can run and op {stuck.id} ({stuck.name}) still waits: the plan deadlocks.", "deadlock"
            )
        machine.advance(opens)
    return machine.starts, machine.ends
