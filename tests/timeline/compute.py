"""What stalls leave of an update: the time in which it computes."""

from __future__ import annotations

from tidegate.plan.ops import COMPUTE_LANES
from tidegate.timeline.stall_analysis import busy_seconds
from tidegate.timeline.timeline import Timeline


def compute_seconds(timeline: Timeline) -> float:
    """Seconds of the update in which the CPU or the device computes. With the stalls they are its wall time."""
    window = timeline.window("update")
    compute = [span for span in timeline.spans if span.lane in COMPUTE_LANES]
    return busy_seconds(compute, window) if window else 0.0
