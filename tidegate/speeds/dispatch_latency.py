"""Dispatch latency: the time from the moment at which an op could start (its lane is free and its dependencies are
done) until the thread of its lane gets a core and starts it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Final

from tidegate.plan.ops import LANES
from tidegate.timeline.timeline import Span

_LANES: Final = frozenset(LANES)
_START: Final = attrgetter("start")
Latencies = Mapping[str, Sequence[float]]
"""Dispatch latencies of single ops in seconds, by lane."""


@dataclass(frozen=True)
class StepTrace:
    """The trace of one step: spans, dependencies of each op, and the call of `step()` (seconds, clock of `spans`)."""

    spans: Sequence[Span]
    deps: Mapping[int, Collection[int]]
    called: float


def dispatch_latencies(steps: Iterable[StepTrace]) -> dict[str, float]:
    """The median dispatch latency of each lane over all ops of these steps, in seconds.

    Two kinds of ops are left out, because their latency cannot be measured: ops that could start before `step()`, and
    ops on the lanes of paths, which may start before the previous op of their lane has ended. The median is used
    because the operating system sometimes gives the core to another thread for a long time; such outliers mostly delay
    no other op.
    """
    return median_by_lane([step_latencies(step) for step in steps])


def median_by_lane(steps: Iterable[Latencies]) -> dict[str, float]:
    """The median latency of each lane over all steps."""
    of_lane: dict[str, list[float]] = {}
    for step in steps:
        for lane, waits in step.items():
            of_lane.setdefault(lane, []).extend(waits)
    return {lane: median(waits) for lane, waits in of_lane.items()}


def step_latencies(step: StepTrace) -> Latencies:
    """The dispatch latencies in one step, in seconds by lane, of the ops for which they are known."""
    found: dict[str, list[float]] = {}
    called, deps = step.called, step.deps
    ends = {span.op: span.end for span in step.spans}
    lane_ends: dict[str, float] = {}
    for span in sorted(step.spans, key=_START):
        lane, start, end = span.lane, span.start, span.end
        ready = lane_ends.get(lane, called)
        if ready < called:
            ready = called
        for dep in deps[span.op]:  # a loop takes a fifth of the time of max(), and this runs while training
            ended = ends.get(dep, called)
            if ended > ready:
                ready = ended
        lane_ends[lane] = end if end > ready else ready
        if ready > called and lane in _LANES:
            found.setdefault(lane, []).append(start - ready if start > ready else 0.0)
    return found
