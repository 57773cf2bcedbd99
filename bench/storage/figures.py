"""Statistics of figures over rounds, and figures from the spans of one step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from tidegate.timeline.stall_analysis import union
from tidegate.timeline.timeline import Span


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Median and quartiles, rounded to `digits` decimals."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, digits), "quartile_low": round(low, digits), "quartile_high": round(high, digits)}


def ratios(of: Sequence[float], by: Sequence[float]) -> list[float]:
    """The ratios of two series, element by element (round by round)."""
    return [one / other for one, other in zip(of, by, strict=True)]


def bytes_between(spans: Iterable[Span], start: float, end: float) -> float:
    """Bytes that were transferred between `start` and `end`. A span that is partly inside counts in proportion. A span
    without length is a transfer that was done before the one ahead of it on its lane: it counts whole."""
    return math.fsum(
        span.nbytes * ((min(span.end, end) - max(span.start, start)) / span.seconds if span.seconds > 0 else 1.0)
        for span in spans
        if span.end > start and span.start < end
    )


def overlap(*groups: Sequence[Span]) -> float:
    """Overlap of several groups of spans: the time in which every group has a span in progress, divided by the busy
    time of the group with the shortest busy time. 0 if a group has no spans."""
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
