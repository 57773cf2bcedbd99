"""How late ops begin: their lane is free and all that they wait for is done, but its thread has no core yet."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from tidegate.plan.ops import LANES
from tidegate.timeline.timeline import Span

_LANES: Final = frozenset(LANES)
Waits = Mapping[str, Sequence[float]]
"""Seconds, by lane."""


@dataclass(frozen=True)
class Ran:
    """What ran in one step: spans, what each op depends on, and when `step()` was called, in seconds of the spans."""

    spans: Sequence[Span]
    deps: Mapping[int, Collection[int]]
    called: float


def late_seconds(steps: Iterable[Ran]) -> dict[str, float]:
    """By lane, how late its ops begin: the median of all ops of these steps of which it is known. That is not so of
    what could begin before `step()`, and of paths, whose lanes run ahead.

    A median, because now and then one op waits for as long as the kernel gives others the core, and then mostly nothing
    waits for it.
    """
    return typical([waits_of(step) for step in steps])


def typical(steps: Iterable[Waits]) -> dict[str, float]:
    """The median of each lane's."""
    found: dict[str, list[float]] = {}
    for step in steps:
        for lane, waits in step.items():
            found.setdefault(lane, []).extend(waits)
    return {lane: median(waits) for lane, waits in found.items()}


def waits_of(step: Ran) -> Waits:
    """How late each op of which it is known began, in seconds."""
    found: dict[str, list[float]] = {}
    ends = {span.op: span.end for span in step.spans}
    lane_ends: dict[str, float] = {}
    for span in sorted(step.spans, key=lambda span: span.start):
        lane = span.lane
        could = max(
            lane_ends.get(lane, step.called), step.called, *(ends.get(dep, step.called) for dep in step.deps[span.op])
        )
        lane_ends[lane] = max(span.end, could)
        if lane in _LANES and could > step.called:
            found.setdefault(lane, []).append(max(0.0, span.start - could))
    return found
