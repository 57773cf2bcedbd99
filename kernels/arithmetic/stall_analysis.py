"""Native stall analysis of an update, because the analysis runs after every training step, on the cores of the
training."""

from __future__ import annotations

from tidegate.kernels import _native
from tidegate.timeline.timeline import Timeline


def exposed_waits(timeline: Timeline) -> dict[str, float]:
    """The same as `tidegate.timeline.stall_analysis.exposed_waits`, with equal results to the last bit."""
    window = timeline.window("update")
    return {} if window is None else _native.exposed_waits(timeline.spans, timeline.deps, *window)
