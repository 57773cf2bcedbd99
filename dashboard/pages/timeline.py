"""Page Timeline: Gantt chart of one update with all ops on their lanes, measured above predicted."""

from __future__ import annotations

import json
from typing import Final, get_args

import streamlit as st

from tidegate.dashboard.data import queries
from tidegate.dashboard.data.step_stats import digest
from tidegate.dashboard.figures.gantt import Scope
from tidegate.dashboard.session.page_context import Place, live
from tidegate.dashboard.style import markup, palette
from tidegate.dashboard.widgets import gantt, header
from tidegate.timeline.chrome_trace import chrome_trace
from tidegate.wire.timeline import TimelineView
from tidegate.wire.translation import as_timeline

SCOPES: Final[dict[Scope, str]] = {"update": "Update", "step": "Whole step"}
NEWEST: Final = "newest"


def timeline(place: Place) -> None:
    _head(place)
    step = _controls(place)
    if step is None:
        _newest(place)
    else:
        _one(place, step)


@live
def _head(place: Place) -> None:
    look = queries.look(place.url, place.run, place.rank)
    if look.snapshot is None:
        header.unread(place, look)
    else:
        header.brief(look, look.snapshot, digest(look.snapshot.steps))


def _controls(place: Place) -> int | None:
    """The step to show, None for the newest. Not a live section: a list must not change while the viewer chooses."""
    asked = st.query_params.get("step", "")
    step = int(asked) if asked.isdecimal() else None
    steps = sorted({*queries.kept_steps(place.url, place.run, place.rank), *([step] if step is not None else [])})
    options = [NEWEST, *map(str, reversed(steps))]
    with st.container(horizontal=True, vertical_alignment="center", key="controls"):
        key = f"step:{place.run}:{place.rank}:{step}"
        st.selectbox(
            "Step", options, index=options.index(str(step)) if step is not None else 0, width=150,
            key=key, label_visibility="collapsed", on_change=_choose, args=(place, key),
            format_func=lambda option: "newest step" if option == NEWEST else f"step {option}",
        )  # fmt: skip
        if step is None:
            st.button("Hold", help="Keep the update that is on the screen, to read it.", on_click=_hold, args=(place,))
        else:
            st.button("Follow", help="Show each new update as it comes.", on_click=_show, args=(place, None))
        st.segmented_control(
            "Shown", get_args(Scope), default="update", required=True, format_func=SCOPES.__getitem__,
            key="gantt_scope", label_visibility="collapsed",
        )  # fmt: skip
        st.checkbox("Prediction", value=True, key="gantt_predicted", help="What the simulator expects of the same ops.")
        st.checkbox("Critical path", value=True, key="gantt_critical", help="The ops that decided when it ended.")
        st.download_button(
            "Trace", data=lambda: _trace(place, step), file_name=f"{place.run}-rank{place.rank}.trace.json",
            mime="application/json", key="trace", on_click="ignore", icon=":material/download:",
            help="For https://ui.perfetto.dev: measured and predicted, with an arrow for each dependency.",
        )  # fmt: skip
    return step


def _show(place: Place, step: int | None) -> None:
    """Writes the step into the address before the page is drawn, so that the page is drawn only once."""
    asked = {"run": place.run} | ({"rank": str(place.rank)} if place.rank else {})
    st.query_params.from_dict(asked | ({} if step is None else {"step": str(step)}))


def _choose(place: Place, key: str) -> None:
    chosen = st.session_state[key]
    _show(place, None if chosen == NEWEST else int(chosen))


def _hold(place: Place) -> None:
    view = queries.newest_timeline(place.url, place.run, place.rank)
    if view is not None:
        _show(place, view.step)


@live
def _newest(place: Place) -> None:
    _draw(place, queries.newest_timeline(place.url, place.run, place.rank))


def _one(place: Place, step: int) -> None:
    """Draws the timeline of a fixed step, which does not change any more and needs no refresh."""
    view = queries.timeline(place.url, place.run, place.rank, step)
    if view is None:
        sentence = f"The timeline of step {step} is not kept any more: choose another step above, or follow the newest."
        st.html(markup.banner(sentence, palette.LIVENESS["stale"]))
        return
    _draw(place, view)


def _draw(place: Place, view: TimelineView | None) -> None:
    scope: Scope = st.session_state["gantt_scope"]
    predicted = None
    if view is not None and st.session_state["gantt_predicted"]:
        predicted = _expected(place, view)
        if predicted is None:
            st.caption("No prediction of this step: it needs measured rates and a timeline that was sent whole.")
    snapshot = queries.look(place.url, place.run, place.rank).snapshot
    gone = snapshot is not None and bool(snapshot.rank.step) and snapshot.rank.liveness in ("lost", "finished")
    gantt.chart(view, predicted, scope, st.session_state["gantt_critical"], gone)
    if view is not None:
        left, right = st.columns([3, 2], gap="medium")
        with left:
            gantt.lanes(view, predicted)
        with right:
            gantt.waits(view, predicted)


def _expected(place: Place, view: TimelineView) -> TimelineView | None:
    return gantt.expected(view, queries.rates(place.url, place.run, place.rank))


def _trace(place: Place, step: int | None) -> str:
    """The step as a Chrome trace; an empty trace if the timeline is no longer stored."""
    if step is None:
        view = queries.newest_timeline(place.url, place.run, place.rank)
    else:
        view = queries.timeline(place.url, place.run, place.rank, step)
    predicted = _expected(place, view) if view else None
    timelines = [as_timeline(found) for found in (view, predicted) if found is not None]
    return json.dumps(chrome_trace(timelines, rank=place.rank, process_name=f"{place.run} rank {place.rank}"))
