"""Alerts and audit: what fires in a run and what to do about it, and everything that was ever done to it."""

from __future__ import annotations

import streamlit as st

from tidegate.dashboard import feed, kept, snippets
from tidegate.dashboard.digest import digest
from tidegate.dashboard.parts import alerts as parts
from tidegate.dashboard.parts import audit, header
from tidegate.dashboard.place import Place, live, told


def alerts(place: Place) -> None:
    st.html(snippets.STYLE)
    _firing(place)
    with told():
        audit.audit(place)


@live
def _firing(place: Place) -> None:
    look = feed.look(place.url, place.run, place.rank)
    if look.snapshot is None:
        header.unread(place, look)
        return
    header.brief(look, look.snapshot, digest(look.snapshot.steps))
    general = kept.ALERTS.get(place.url, "").value or []
    found = [*look.snapshot.alerts, *general]
    parts.firing(found, place.run)
    parts.resolved(found)
