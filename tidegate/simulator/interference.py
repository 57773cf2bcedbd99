"""Lanes that slow each other down by a share measured for each pair: a disk read and written at once, a memory bus."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from tidegate.plan.ops import Op
from tidegate.plan.plan import Plan
from tidegate.simulator.event_loop import Lane, Times, times_together

Keeps = Mapping[str, Mapping[str, float]]
"""`keeps[lane][other]`: share of its speed alone that `lane` keeps while `other` works, above 0 and up to 1. What is
not there is 1. What several others take adds up: the time that a lane loses to each."""


def speed(lane: str, at_work: Collection[str], keeps: Keeps) -> float:
    """Share of its speed alone that `lane` has while the lanes `at_work` (itself may be among them) work.

    A lane that keeps a half beside another takes twice as long: for every second of its own it waits for one of the
    other. Beside two such lanes it waits for two, and keeps a third, as three do that take turns on one disk.
    """
    lost = (1 / share - 1 for other, share in keeps.get(lane, {}).items() if other in at_work and other != lane)
    return 1 / (1 + math.fsum(lost))


def contended_times(
    plan: Plan, seconds: Mapping[int, float], keeps: Keeps, gates: Mapping[int, float]
) -> tuple[Times, Times]:
    """When each op starts and ends. Equal inputs give equal times.

    seconds: what each op takes alone. gates: the earliest start of ops that have one. PlanError when it deadlocks.
    """

    def speeds(at_work: Mapping[Lane, Op]) -> dict[Lane, float]:
        names = {lane for _, lane in at_work}
        return {lane: speed(lane[1], names, keeps) for lane in at_work}

    [times] = times_together([plan], lambda op: seconds[op.id], lambda op: gates.get(op.id, 0.0), speeds)
    return times
