"""Gantt chart of one update with its caption, and tables of lanes and waits, measured and predicted."""

from __future__ import annotations

import functools
from typing import Final

import streamlit as st

from tidegate import units
from tidegate.dashboard.data.identity_key import IdentityKey
from tidegate.dashboard.data.lane_stats import LaneUse, lane_use
from tidegate.dashboard.figures import chart_style
from tidegate.dashboard.figures.chart_style import Figure
from tidegate.dashboard.figures.gantt import HEIGHT, Scope, gantt, window
from tidegate.dashboard.style import markup, palette
from tidegate.dashboard.widgets.figure import draw, theme
from tidegate.dashboard.widgets.header import prediction_error
from tidegate.errors import TidegateError
from tidegate.simulator.replay import replay
from tidegate.speeds.rate_card import RateCard
from tidegate.timeline.stall_analysis import exposed_waits
from tidegate.wire.timeline import TimelineView
from tidegate.wire.translation import as_timeline, as_view

KEPT: Final = 16
"""Number of cached predictions and of cached figures. With thousands of ops, making a prediction or a figure takes a
third of a second."""
NOTHING_YET = "No update has been measured yet. It shows here when the first step has finished."
GONE = "The updates of this run are not kept any more: the daemon has them in memory until it ends."


def expected(view: TimelineView, rates: RateCard | None) -> TimelineView | None:
    """The timeline that the simulator predicts for the plan of the measured timeline `view`. None if there are no
    rates, if `view` has only some of its spans, or if the simulation fails."""
    if rates is None or view.num_spans > len(view.spans):
        return None
    return _expected(IdentityKey(view), IdentityKey(rates))


@functools.lru_cache(KEPT)
def _expected(view: IdentityKey[TimelineView], rates: IdentityKey[RateCard]) -> TimelineView | None:
    try:
        return as_view(replay(as_timeline(view.value), rates.value))
    except TidegateError:
        return None


@functools.lru_cache(KEPT)
def _figure(
    view: IdentityKey[TimelineView], predicted: IdentityKey[TimelineView | None], scope: Scope, ink: str | None
) -> Figure:
    return gantt(view.value, scope, predicted=predicted.value, ink=ink)


def chart(
    view: TimelineView | None, predicted: TimelineView | None, scope: Scope, critical: bool, gone: bool = False
) -> None:
    """Draws the Gantt chart of one update, or a note if `view` is None.

    view, predicted: measured and predicted timeline. critical: whether to mark the critical path. gone: whether the run
    has ended. The note then says that its updates are no longer stored; otherwise, that none was measured yet.
    """
    if view is None:
        st.html(markup.title("Update, by lane"))
        draw(chart_style.empty(GONE if gone else NOTHING_YET, HEIGHT), "gantt")
        return
    st.html(markup.title("Update, by lane", _words(view, predicted)))
    ink = palette.INK[theme()] if critical else None
    draw(_figure(IdentityKey(view), IdentityKey(predicted), scope, ink), "gantt")


def _words(view: TimelineView, predicted: TimelineView | None) -> str:
    first, last = window(view, "update")
    said = f"step {view.step}, {units.seconds(last - first)} measured"
    if predicted is not None:
        begin, end = window(predicted, "update")
        error = prediction_error(end - begin, last - first)
        said += f" (above), {units.seconds(end - begin)} predicted of the same plan (below, pale): {error}"
    if view.num_spans > len(view.spans):
        said += f"; the first {len(view.spans)} of {view.num_spans} ops"
    return said


def lanes(view: TimelineView, predicted: TimelineView | None) -> None:
    """Draws a table of the lanes: busy time, speed, and predicted busy time."""
    expected = {use.lane: use for use in lane_use(predicted, *window(predicted, "update"))} if predicted else {}
    rows = []
    for use in lane_use(view, *window(view, "update")):
        color = palette.lane(use.lane)
        then = expected.get(use.lane)
        rows.append(
            (
                markup.dot(use.lane, color),
                str(use.num_ops),
                units.seconds(use.busy_seconds),
                units.seconds(then.busy_seconds if then else None),
                markup.bar(use.busy_share, units.share(use.busy_share), color),
                *_work(use),
            )
        )
    columns = ("lane", "ops", "busy", "predicted", "of the update", "moved", "speed")
    st.html(markup.title("Lanes", "in this update") + markup.table(columns, rows))


def _work(use: LaneUse) -> tuple[str, str]:
    """Two texts for a lane: the bytes that it moved or the parameters that it updated, and its speed (bytes or
    parameters per second)."""
    if use.nbytes:
        return units.nbytes(use.nbytes), units.rate(use.bytes_per_second)
    if use.numel:
        return f"{units.count(use.numel)} params", f"{units.count(use.params_per_second)}/s"
    return units.NONE, units.NONE


def waits(view: TimelineView, predicted: TimelineView | None) -> None:
    """Draws a table of the update's waits by cause, measured and predicted."""
    found = exposed_waits(as_timeline(view))
    expected = exposed_waits(as_timeline(predicted)) if predicted else {}
    first, last = window(view, "update")
    rows = [
        (
            markup.dot(cause, palette.cause(cause)),
            units.seconds(found.get(cause, 0.0)),
            units.seconds(expected.get(cause, 0.0) if predicted else None),
            _share(found.get(cause, 0.0), last - first, palette.cause(cause)),
        )
        for cause in sorted({*found, *expected}, key=lambda cause: -found.get(cause, 0.0))
    ]
    title = markup.title("Waits", "in which nothing computed, in this update")
    if rows:
        st.html(title + markup.table(("for", "measured", "predicted", "of the update"), rows))
    else:
        st.html(title)
        st.caption("None: something was being updated all the time.")


def _share(seconds: float, whole: float, color: str) -> str:
    return markup.bar(seconds / whole, units.share(seconds / whole), color) if whole > 0 else units.NONE
