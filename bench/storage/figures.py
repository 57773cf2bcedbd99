"""Figures of many rounds, and of the spans of one step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from tidegate.timeline.stall_analysis import union
from tidegate.timeline.timeline import Span


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, digits), "quartile_low": round(low, digits), "quartile_high": round(high, digits)}


def ratios(of: Sequence[float], by: Sequence[float]) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(of, by, strict=True)]


def bytes_between(spans: Iterable[Span], start: float, end: float) -> float:
    """What was moved in a stretch of time: a span that only reaches into it counts in proportion."""
    return math.fsum(
        span.nbytes * (min(span.end, end) - max(span.start, start)) / (span.end - span.start)
        for span in spans
        if span.end > span.start and span.end > start and span.start < end
    )


def overlap(*groups: Sequence[Span]) -> float:
    """Time in which a span of every group is in progress, by the busy time of the group that is busy for the shortest
    time; 0 when a group has no spans."""
    stretches = [union(group) for group in groups]
    edges = sorted(edge for group in stretches for start, end in group for edge in ((start, 1), (end, -1)))
    running, since, together = 0, 0.0, 0.0
    for at, change in edges:
        if running == len(groups):
            together += at - since
        running, since = running + change, at
    shortest = min(math.fsum(end - start for start, end in group) for group in stretches)
    return together / shortest if shortest else 0.0


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
