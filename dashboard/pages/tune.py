"""Page Tune: the present knobs of a run, the fields that change them, the preview of a change, and rollback."""

from __future__ import annotations

import streamlit as st

from tidegate.dashboard.data import queries
from tidegate.dashboard.session.page_context import PageContext, errors_shown, refreshed, refreshed_slowly
from tidegate.dashboard.style import snippets
from tidegate.dashboard.widgets import advice, editor, forecast, header, history, knobs_now, trial


def tune(context: PageContext) -> None:
    """Draws the page. Live sections refresh as fragments; the editor does not, so that a refresh discards no edit."""
    st.html(snippets.STYLE)
    header.live(context)
    left, right = st.columns([4, 7], gap="medium")
    with right:
        _knobs(context)
    with left:
        _editor(context)
    _history(context)


@refreshed
def _knobs(context: PageContext) -> None:
    snapshot = queries.snapshot_reading(context.url, context.run, context.rank).value
    if snapshot is not None:
        knobs_now.knobs_now(snapshot)
        forecast.preview(snapshot)
        trial.last_change(snapshot)
        advice.advice(context, snapshot)


@refreshed_slowly
def _history(context: PageContext) -> None:
    snapshot = queries.snapshot_reading(context.url, context.run, context.rank).value
    if snapshot is not None:
        history.history(context, snapshot)


@errors_shown()
def _editor(context: PageContext) -> None:
    snapshot = queries.snapshot_reading(context.url, context.run, context.rank).value
    if snapshot is not None:
        editor.editor(context, snapshot.knobs)
