"""Event-driven simulation of plans whose lanes slow each other down: the speed of each lane depends on the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tidegate.errors import PlanError
from tidegate.plan.interference import Demand, InterferenceFactors, Lane, lane_speeds
from tidegate.plan.ops import Op
from tidegate.plan.plan import Plan

Times = dict[int, float]
"""Start times, or end times, of ops in seconds, by op id."""


@dataclass
class _Lanes:
    """The state of the simulation: for each lane of each rank its waiting ops, the op that is running, and the seconds
    that this op still needs at full speed."""

    plans: Sequence[Plan]
    seconds: Callable[[Op], float]
    gate: Callable[[Op], float]
    keeps: InterferenceFactors
    demand: Callable[[Op], Demand] | None
    waiting: dict[Lane, list[Op]] = field(init=False)
    at_work: dict[Lane, Op] = field(default_factory=dict)
    left: dict[Lane, float] = field(default_factory=dict)
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
        """Starts the ops that can start now. An op cannot start before its gate (a given time), even if it is ready.
        Returns the earliest gate of the ops that wait only for their gate; infinite if there is none."""
        opens = math.inf
        for lane, ops in self.waiting.items():
            if lane in self.at_work or not ops:
                continue
            op, rank = ops[-1], lane[0]
            if not all(map(self.ends[rank].__contains__, op.deps)):
                continue
            if (gate := self.gate(op)) > self.now:
                opens = min(opens, gate)
                continue
            ops.pop()
            self.starts[rank][op.id] = self.now
            self.at_work[lane], self.left[lane] = op, self.seconds(op)
        return opens

    def advance(self, opens: float) -> None:
        """Advances the clock to the next end of an op, or to the time `opens` (the next gate) if that is sooner."""
        speeds = lane_speeds(self.at_work, self.keeps, self.demand)
        remaining = {lane: left / speeds[lane] for lane, left in self.left.items()}
        first = min(remaining, key=remaining.__getitem__, default=None)
        if first is None or self.now + remaining[first] > opens:
            elapsed, self.now, first = opens - self.now, opens, None
        else:
            elapsed = remaining[first]
            self.now += elapsed
        for lane, left in self.left.items():
            self.left[lane] = max(0.0, left - elapsed * speeds[lane])
        if first is not None:
            del self.left[first]
            self.ends[first[0]][self.at_work.pop(first).id] = self.now


def times_together(
    plans: Sequence[Plan],
    seconds: Callable[[Op], float],
    gate: Callable[[Op], float],
    keeps: InterferenceFactors,
    demand: Callable[[Op], Demand] | None = None,
) -> list[tuple[Times, Times]]:
    """Start and end times of all ops, for each rank's plan. Equal inputs give equal times.

    seconds: gives the run time of an op at full speed. gate: gives the earliest start of an op. keeps, demand: see
    `lane_speeds`. PlanError when a plan deadlocks.
    """
    lanes = _Lanes(plans, seconds, gate, keeps, demand)
    left = sum(len(plan.ops) for plan in plans)
    while sum(map(len, lanes.ends)) < left:
        opens = lanes.start()
        if not lanes.at_work and opens == math.inf:
            stuck = next(ops[-1] for ops in lanes.waiting.values() if ops)
            raise PlanError(
                f"Nothing can run and op {stuck.id} ({stuck.name}) still waits: the plan deadlocks.", "deadlock"
            )
        lanes.advance(opens)
    return list(zip(lanes.starts, lanes.ends, strict=True))
