"""What an update waited for, natively: it is asked after every step of a training, on its cores."""

from __future__ import annotations

from tidegate.kernels import _native
from tidegate.timeline.timeline import Timeline


def exposed_waits(timeline: Timeline) -> dict[str, float]:
    """`tidegate.timeline.stall_analysis.exposed_waits`, which says what it means: the same seconds, to the last bit."""
    window = timeline.window("update")
    return {} if window is None else _native.exposed_waits(timeline.spans, timeline.deps, *window)
