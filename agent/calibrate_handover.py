"""What an op costs that does nothing: handing it to its lane, waking the lane, noting that it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from tidegate.agent.devices.base import DoneEvent, Event
from tidegate.agent.engine.clock import MonotonicClock
from tidegate.agent.engine.executor import Executor, Issued
from tidegate.plan import Placement, Plan, Subgroup, make_plan
from tidegate.plan.ops import LANES, Op, path_lanes

SUBGROUPS: Final = 24
STEPS: Final = 7


class _Nothing:
    """Runs ops by doing nothing."""

    def wait(self, lane: str, event: Event) -> None:
        return

    def run(self, op: Op, begun: Callable[[], None]) -> Issued:
        now = time.monotonic()
        return Issued(DoneEvent(now, now), 0, 0)


def handover_seconds(paths: Sequence[str]) -> float:
    """Seconds for each op of a step whose ops do nothing, updated in turns on the CPU and on the device."""
    plan = _plan(paths)
    lanes = [lane for path in paths for lane in path_lanes(path)]
    executor = Executor(_Nothing(), MonotonicClock(), lanes=(*LANES, *lanes), ahead=lanes)
    try:
        return median(_seconds(executor, plan) for _ in range(STEPS)) / len(plan.ops)
    finally:
        executor.close()


def _seconds(executor: Executor, plan: Plan) -> float:
    began = time.monotonic()
    executor.start(plan)
    executor.step()
    executor.finish()
    return time.monotonic() - began


def _plan(paths: Sequence[str]) -> Plan:
    subgroups = [Subgroup(i, 1, weight_bytes=2, grad_bytes=2, state_bytes=10) for i in range(SUBGROUPS)]
    homes = [*paths] or ["host"]
    placements = []
    for i in range(SUBGROUPS):
        home = homes[i // 2 % len(homes)]
        on_cpu = i % 2 == 0
        placements.append(Placement("cpu" if on_cpu else "device", home, home, mirror_valid=on_cpu and home == "host"))
    return make_plan(subgroups, placements, num_slots=2, host_slots=dict.fromkeys(paths, 3))
