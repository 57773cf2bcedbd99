"""The last update: its Gantt, its lanes, its stalls, and who updated what."""

from __future__ import annotations

from typing import get_args

import streamlit as st

from tidegate.analysis import stalls
from tidegate.dashboard import charts, markup, palette, units
from tidegate.dashboard.digest import Digest
from tidegate.dashboard.feed import Snapshot
from tidegate.dashboard.gantt import HEIGHT, Scope, as_timeline, gantt, window
from tidegate.dashboard.lanes import LaneUse, lane_use
from tidegate.dashboard.parts.header import prediction
from tidegate.dashboard.parts.phases import CONFIG
from tidegate.wire import TimelineView

HELD = "gantt_held"
SCOPES: dict[Scope, str] = {"update": "Update", "step": "Whole step"}


def last_update(snapshot: Snapshot) -> None:
    """The Gantt of the newest timeline."""
    left, middle, right = st.columns([5, 2, 3], vertical_alignment="center")
    held = middle.toggle("Hold", key="gantt_hold", help="Keep this update on the screen, to zoom in and read it.")
    view = _held(snapshot) if held else snapshot.timeline
    if not held:
        st.session_state.pop(HELD, None)
    scope: Scope = right.segmented_control(
        "Shown", get_args(Scope), default="update", required=True, format_func=SCOPES.__getitem__,
        key="gantt_scope", label_visibility="collapsed", width="stretch",
    )  # fmt: skip
    if view is None:
        left.html(markup.title("Last update, by lane"))
        st.plotly_chart(charts.empty("No update has been measured yet.", HEIGHT), key="gantt", config=CONFIG)
        return
    first, last = window(view, scope)
    cut = f", first {len(view.spans)} of {view.num_spans} ops" if view.num_spans > len(view.spans) else ""
    left.html(markup.title("Last update, by lane", f"step {view.step}, {units.seconds(last - first)}{cut}"))
    st.plotly_chart(gantt(view, stalls(as_timeline(view)), scope), key="gantt", config=CONFIG)


def _held(snapshot: Snapshot) -> TimelineView | None:
    """The timeline that was on the screen when the viewer chose to hold it, as long as it is of this run and rank."""
    whose = (snapshot.run.run, snapshot.rank.rank)
    kept: tuple[tuple[str, int], TimelineView | None] = st.session_state.get(HELD, (whose, snapshot.timeline))
    if kept[0] != whose:
        kept = (whose, snapshot.timeline)
    st.session_state[HELD] = kept
    return kept[1]


def lanes(snapshot: Snapshot) -> None:
    """How busy each lane was in that update, and at what speed."""
    st.html(markup.title("Lanes", "in the last update"))
    if snapshot.timeline is None:
        st.html(markup.table(("lane", "ops", "busy", "of the update", "moved", "speed"), []))
        return
    rows = []
    for use in lane_use(snapshot.timeline, *window(snapshot.timeline, "update")):
        color = palette.lane(use.lane)
        work, speed = _work(use)
        rows.append(
            (
                markup.dot(use.lane, color),
                str(use.num_ops),
                units.seconds(use.busy_seconds),
                markup.bar(use.busy_share, units.share(use.busy_share), color),
                work,
                speed,
            )
        )
    st.html(markup.table(("lane", "ops", "busy", "of the update", "moved", "speed"), rows))


def _work(use: LaneUse) -> tuple[str, str]:
    """What the lane moved or updated, and how fast."""
    if use.nbytes:
        return units.nbytes(use.nbytes), units.rate(use.bytes_per_second)
    if use.numel:
        return f"{units.count(use.numel)} params", f"{units.count(use.params_per_second)}/s"
    return units.NONE, units.NONE


def waits(snapshot: Snapshot, figures: Digest) -> None:
    total = sum(figures.stall_share.values())
    st.html(markup.title("Stalls by cause", f"{units.share(total)} of the update, mean of {figures.steps} steps"))
    st.plotly_chart(charts.stalls_by_cause(snapshot.steps), key="stalls", config=CONFIG)


def division(snapshot: Snapshot, figures: Digest) -> None:
    """Who updates, what lives where, and what the simulator expected."""
    last = snapshot.steps[-1] if snapshot.steps else None
    rows = [*_shares("updated by", "params", last.update_params if last else {})]
    rows += _shares("state on", "subgroups", last.subgroups if last else {})
    note = prediction(snapshot.rank.predicted_update_seconds, figures.phase_seconds.get("update"))
    st.html(
        markup.title("Division of work", "last step")
        + markup.table(("", "", ""), rows)
        + markup.title("Update", f"{note} (median of {figures.steps} steps)")
    )


def _shares(what: str, unit: str, counts: dict[str, int]) -> list[tuple[str, str, str]]:
    total = sum(counts.values())
    return [
        (
            markup.dot(f"{what} {place}", palette.place(place)),
            f"{units.count(number)} {unit}",
            markup.bar(number / total, units.share(number / total), palette.place(place)) if total else units.NONE,
        )
        for place, number in sorted(counts.items(), reverse=True)
    ]
