"""Tune: the knobs of a run as they are, and the form that turns them."""

from __future__ import annotations

import streamlit as st

from tidegate.dashboard import feed
from tidegate.dashboard.digest import digest
from tidegate.dashboard.parts import control, form, header
from tidegate.dashboard.place import Place, live


def tune(place: Place) -> None:
    _head(place)
    left, right = st.columns([2, 3], gap="medium")
    with right:
        _knobs(place)
    with left:
        _form(place)


@live
def _head(place: Place) -> None:
    look = feed.look(place.url, place.run, place.rank)
    if look.snapshot is None:
        header.unread(place, look)
    else:
        header.brief(look, look.snapshot, digest(look.snapshot.steps))


@live
def _knobs(place: Place) -> None:
    snapshot = feed.look(place.url, place.run, place.rank).snapshot
    if snapshot is not None:
        control.knobs(snapshot)
        control.history(snapshot)


def _form(place: Place) -> None:
    """Outside of every live part: a refresh never eats an edit."""
    snapshot = feed.look(place.url, place.run, place.rank).snapshot
    if snapshot is not None:
        form.form(place.url, snapshot.knobs)
