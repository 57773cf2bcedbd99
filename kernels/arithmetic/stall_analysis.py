"""Stall analysis of an update in native code. It runs after every training step, on the cores of the training, and must
be fast."""

from __future__ import annotations

from typing import Final

from tidegate.kernels import _native
from tidegate.timeline.timeline import DISPATCH, Timeline

_NATIVE_DISPATCH: Final = "scheduler"
"""The name that the native code gives to the cause `dispatch`."""


def exposed_waits(timeline: Timeline) -> dict[str, float]:
    """The same as `tidegate.timeline.stall_analysis.exposed_waits`, with equal results to the last bit."""
    window = timeline.window("update")
    if window is None:
        return {}
    waits = _native.exposed_waits(timeline.spans, timeline.deps, *window)
    if _NATIVE_DISPATCH in waits:
        waits[DISPATCH] = waits.pop(_NATIVE_DISPATCH)
    return waits
