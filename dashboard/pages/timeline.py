"""Page Timeline: Gantt chart of one update with all ops on their lanes, measured above predicted."""

from __future__ import annotations

import json
from typing import Final, get_args

import streamlit as st

from tidegate.dashboard.data import queries
from tidegate.dashboard.figures.gantt import Scope
from tidegate.dashboard.session.page_context import PageContext, refreshed
from tidegate.dashboard.style import markup, palette
from tidegate.dashboard.widgets import gantt, header
from tidegate.timeline.chrome_trace import chrome_trace
from tidegate.wire.timeline import TimelineView
from tidegate.wire.translation import as_timeline

SCOPES: Final[dict[Scope, str]] = {"update": "Update", "step": "Whole step"}
NEWEST: Final = "newest"


def timeline(context: PageContext) -> None:
    header.live(context)
    step = _controls(context)
    if step is None:
        _newest(context)
    else:
        _one(context, step)


def _controls(context: PageContext) -> int | None:
    """Draws the controls (choice of step, scope, download), and returns the step to show; None for the newest. They do
    not refresh by themselves, because a list must not change while the viewer chooses."""
    asked = st.query_params.get("step", "")
    step = int(asked) if asked.isdecimal() else None
    steps = sorted({*queries.kept_steps(context.url, context.run, context.rank), *([step] if step is not None else [])})
    options = [NEWEST, *map(str, reversed(steps))]
    with st.container(horizontal=True, vertical_alignment="center", key="controls"):
        key = f"step:{context.run}:{context.rank}:{step}"
        st.selectbox(
            "Step", options, index=options.index(str(step)) if step is not None else 0, width=150,
            key=key, label_visibility="collapsed", on_change=_choose, args=(context, key),
            format_func=lambda option: "newest step" if option == NEWEST else f"step {option}",
        )  # fmt: skip
        if step is None:
            st.button(
                "Hold", help="Keep the update that is on the screen, to read it.", on_click=_hold, args=(context,)
            )
        else:
            st.button("Follow", help="Show each new update as it comes.", on_click=_show, args=(context, None))
        st.segmented_control(
            "Shown", get_args(Scope), default="update", required=True, format_func=SCOPES.__getitem__,
            key="gantt_scope", label_visibility="collapsed",
        )  # fmt: skip
        st.checkbox("Prediction", value=True, key="gantt_predicted", help="What the simulator expects of the same ops.")
        st.checkbox("Critical path", value=True, key="gantt_critical", help="The ops that decided when it ended.")
        st.download_button(
            "Trace", data=lambda: _trace(context, step), file_name=f"{context.run}-rank{context.rank}.trace.json",
            mime="application/json", key="trace", on_click="ignore", icon=":material/download:",
            help="For https://ui.perfetto.dev: measured and predicted, with an arrow for each dependency.",
        )  # fmt: skip
    return step


def _show(context: PageContext, step: int | None) -> None:
    """Makes `step` (None: the newest) the shown step: writes it into the query of the page's address. It runs as the
    callback of a widget, before the page is drawn, so that the page is drawn only once."""
    asked = {"run": context.run} | ({"rank": str(context.rank)} if context.rank else {})
    st.query_params.from_dict(asked | ({} if step is None else {"step": str(step)}))


def _choose(context: PageContext, key: str) -> None:
    chosen = st.session_state[key]
    _show(context, None if chosen == NEWEST else int(chosen))


def _hold(context: PageContext) -> None:
    view = queries.newest_timeline(context.url, context.run, context.rank)
    if view is not None:
        _show(context, view.step)


@refreshed
def _newest(context: PageContext) -> None:
    _draw(context, queries.newest_timeline(context.url, context.run, context.rank))


def _one(context: PageContext, step: int) -> None:
    """Draws the timeline of a fixed step, which does not change any more and needs no refresh."""
    view = queries.timeline(context.url, context.run, context.rank, step)
    if view is None:
        sentence = f"The timeline of step {step} is not kept any more: choose another step above, or follow the newest."
        st.html(markup.banner(sentence, palette.LIVENESS["stale"]))
    else:
        _draw(context, view)


def _draw(context: PageContext, view: TimelineView | None) -> None:
    scope: Scope = st.session_state["gantt_scope"]
    predicted = None
    if view is not None and st.session_state["gantt_predicted"]:
        predicted = _expected(context, view)
        if predicted is None:
            st.caption("No prediction of this step: it needs measured rates and a timeline that was sent whole.")
    snapshot = queries.snapshot_reading(context.url, context.run, context.rank).value
    gone = (
        snapshot is not None and bool(snapshot.rank.step) and snapshot.rank.liveness in ("lost", "failed", "finished")
    )
    gantt.chart(view, predicted, scope, st.session_state["gantt_critical"], gone)
    if view is not None:
        left, right = st.columns([3, 2], gap="medium")
        with left:
            gantt.lanes(view, predicted)
        with right:
            gantt.waits(view, predicted)


def _expected(context: PageContext, view: TimelineView) -> TimelineView | None:
    return gantt.expected(view, queries.rates(context.url, context.run, context.rank))


def _trace(context: PageContext, step: int | None) -> str:
    """The step as a Chrome trace; an empty trace if the timeline is no longer stored."""
    if step is None:
        view = queries.newest_timeline(context.url, context.run, context.rank)
    else:
        view = queries.timeline(context.url, context.run, context.rank, step)
    predicted = _expected(context, view) if view else None
    timelines = [as_timeline(found) for found in (view, predicted) if found is not None]
    return json.dumps(chrome_trace(timelines, rank=context.rank, process_name=f"{context.run} rank {context.rank}"))
