"""Runs a plan in virtual time where lanes slow each other down: a disk read and written at once, a memory bus."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidegate.errors import PlanError
from tidegate.plan.ops import Op
from tidegate.plan.plan import Plan

Keeps = Mapping[str, Mapping[str, float]]
"""`keeps[lane][other]`: share of its speed alone that `lane` keeps while `other` works, above 0 and up to 1. What is
not there is 1. What several others take adds up: the time that a lane loses to each."""
Times = dict[int, float]
"""Seconds by op id."""


def speed(lane: str, at_work: Mapping[str, object], keeps: Keeps) -> float:
    """Share of its speed alone that `lane` has while the lanes `at_work` (itself may be among them) work.

    A lane that keeps a half beside another takes twice as long: for every second of its own it waits for one of the
    other. Beside two such lanes it waits for two, and keeps a third, as three do that take turns on one disk.
    """
    lost = (1 / share - 1 for other, share in keeps.get(lane, {}).items() if other in at_work and other != lane)
    return 1 / (1 + math.fsum(lost))


@dataclass
class _Machine:
    """Lanes with the ops that wait on each, and what each works at: the op and the seconds that it would take alone."""

    plan: Plan
    keeps: Keeps
    gates: Mapping[int, float]
    waiting: dict[str, list[Op]] = field(init=False)
    at_work: dict[str, tuple[Op, float]] = field(default_factory=dict)
    starts: Times = field(default_factory=dict)
    ends: Times = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.waiting = {lane: list(reversed(ops)) for lane, ops in self.plan.lanes.items() if ops}

    def start(self, seconds: Mapping[int, float]) -> float:
        """Starts what can start now. Returns when the first gate opens that alone holds something up."""
        opens = math.inf
        for lane, ops in self.waiting.items():
            if lane in self.at_work or not ops or any(dep not in self.ends for dep in ops[-1].deps):
                continue
            gate = self.gates.get(ops[-1].id, 0.0)
            if gate > self.now:
                opens = min(opens, gate)
                continue
            op = ops.pop()
            self.starts[op.id] = self.now
            self.at_work[lane] = (op, seconds[op.id])
        return opens

    def advance(self, opens: float) -> None:
        """On to the end of the op that ends first, or to `opens`."""
        speeds = {lane: speed(lane, self.at_work, self.keeps) for lane in self.at_work}
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


def contended_times(
    plan: Plan, seconds: Mapping[int, float], keeps: Keeps, gates: Mapping[int, float]
) -> tuple[Times, Times]:
    """When each op starts and ends. Equal inputs give equal times.

    seconds: what each op takes alone. gates: the earliest start of ops that have one. PlanError when it deadlocks.
    """
    machine = _Machine(plan, keeps, gates)
    while len(machine.ends) < len(plan.ops):
        opens = machine.start(seconds)
        if not machine.at_work and opens == math.inf:
            stuck = next(ops[-1] for ops in machine.waiting.values() if ops)
            raise PlanError(
                f"Nothing can run and op {stuck.id} ({stuck.name}) still waits: the plan deadlocks.", "deadlock"
            )
        machine.advance(opens)
    return machine.starts, machine.ends
