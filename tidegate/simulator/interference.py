"""Pairwise interference: lanes slow each other down by measured factors, as reads and writes of a disk do, or all users
of a memory bus."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from tidegate.plan.ops import Op
from tidegate.plan.plan import Plan
from tidegate.simulator.event_loop import Lane, Times, times_together

InterferenceFactors = Mapping[str, Mapping[str, float]]
"""Interference factors: `keeps[lane][other]` is the speed of `lane` while `other` works, divided by its speed alone;
above 0 and up to 1. Absent entries are 1. The slowdowns by several other lanes add up (`relative_speed`)."""


def relative_speed(lane: str, at_work: Collection[str], keeps: InterferenceFactors) -> float:
    """The speed of `lane` while the lanes `at_work` (it may be among them) work, divided by its speed alone.

    A lane with a factor of 1/2 takes twice as long: for each second of its own work it waits one second for the other
    lane. While two such lanes work, it waits two seconds and has 1/3 of its speed, as three lanes do that take turns on
    one disk.
    """
    lost = (1 / share - 1 for other, share in keeps.get(lane, {}).items() if other in at_work and other != lane)
    return 1 / (1 + math.fsum(lost))


def contended_times(
    plan: Plan, seconds: Mapping[int, float], keeps: InterferenceFactors, gates: Mapping[int, float]
) -> tuple[Times, Times]:
    """Start and end times of all ops of `plan` under interference. Equal inputs give equal times.

    seconds: run time of each op alone, by op id. gates: earliest starts, by op id; absent: no gate. PlanError when the
    plan deadlocks.
    """

    def speeds(at_work: Mapping[Lane, Op]) -> dict[Lane, float]:
        names = {lane for _, lane in at_work}
        return {lane: relative_speed(lane[1], names, keeps) for lane in at_work}

    [times] = times_together([plan], lambda op: seconds[op.id], lambda op: gates.get(op.id, 0.0), speeds)
    return times
