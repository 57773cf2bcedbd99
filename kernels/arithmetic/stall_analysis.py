"""Stall analysis of an update in native code. It runs after every training step, on the cores of the training, and
takes a tenth of the time of the Python function. The overhead of steps of 0.3 s has no room for more under its bound
(`docs/decisions/telemetry.md`)."""

from __future__ import annotations

from tidegate.kernels import _native
from tidegate.kernels.arithmetic.span_sums import SpanTable


def exposed_waits(
    spans: SpanTable, deps: dict[int, tuple[int, ...]], window: tuple[float, float] | None
) -> dict[str, float]:
    """Stalls of the update in seconds, by cause: the times in which neither CPU nor device computed. Equals the Python
    function `tidegate.timeline.stall_analysis.exposed_waits` to the last bit.

    deps: ids of the ops that each op depends on. window: start and end of the update; None if there is none, and the
    result is then empty.
    """
    return {} if window is None else _native.exposed_waits(spans, deps, *window)
