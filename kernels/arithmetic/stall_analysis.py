"""Stall analysis of an update in native code. It runs after every training step, on the cores of the training: 18 µs
for 100 ops, where the Python function takes 85 µs. The overhead of steps of 0.3 s has no room for more under its bound
(`docs/decisions/telemetry.md`)."""

from __future__ import annotations

from tidegate.kernels import _native
from tidegate.timeline.timeline import Timeline


def exposed_waits(timeline: Timeline) -> dict[str, float]:
    """Stalls of the update in seconds, by cause: the times in which neither CPU nor device computed. Empty if the
    timeline has no update. Equals the Python function `tidegate.timeline.stall_analysis.exposed_waits` to the last
    bit."""
    window = timeline.window("update")
    if window is None:
        return {}
    return _native.exposed_waits(timeline.spans, timeline.deps, *window)
