"""Page Tune: the present knobs of a run, the fields that change them, the preview of a change, and rollback."""

from __future__ import annotations

import streamlit as st

from tidegate.dashboard.data import queries
from tidegate.dashboard.data.step_stats import digest
from tidegate.dashboard.session.page_context import Place, live, slow, told
from tidegate.dashboard.style import snippets
from tidegate.dashboard.widgets import advice, editor, forecast, header, history, knobs_now, trial


def tune(place: Place) -> None:
    """Draws the page. Live sections refresh as fragments; the editor does not, so that a refresh discards no edit."""
    st.html(snippets.STYLE)
    _head(place)
    left, right = st.columns([4, 7], gap="medium")
    with right:
        _knobs(place)
    with left:
        _editor(place)
    _history(place)


@live
def _head(place: Place) -> None:
    look = queries.look(place.url, place.run, place.rank)
    if look.snapshot is None:
        header.unread(place, look)
    else:
        header.brief(look, look.snapshot, digest(look.snapshot.steps))


@live
def _knobs(place: Place) -> None:
    snapshot = queries.look(place.url, place.run, place.rank).snapshot
    if snapshot is not None:
        knobs_now.knobs_now(snapshot)
        forecast.preview(snapshot)
        trial.last_change(snapshot)
        advice.advice(place, snapshot)


@slow
def _history(place: Place) -> None:
    snapshot = queries.look(place.url, place.run, place.rank).snapshot
    if snapshot is not None:
        history.history(place, snapshot)


def _editor(place: Place) -> None:
    snapshot = queries.look(place.url, place.run, place.rank).snapshot
    if snapshot is not None:
        with told():
            editor.editor(place, snapshot.knobs)
