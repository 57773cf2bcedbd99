"""Alerts and audit: what fires in a run and what to do about it, and everything that was ever done to it."""

from __future__ import annotations

import streamlit as st

from tidegate.dashboard import feed, kept, markup, palette, snippets
from tidegate.dashboard.digest import digest
from tidegate.dashboard.firing import NO_RUN
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
    own, general = (kept.ALERTS.get(place.url, run) for run in (place.run, NO_RUN))
    for reading, whose in ((own, f"of {place.run}"), (general, "that concern no run")):
        if reading.problem and not look.problem:
            sentence = f"Alerts {whose} are not known as of now: {reading.problem}"
            st.html(markup.banner(sentence, palette.LIVENESS["lost"]))
    found = [*(own.value or ()), *(general.value or ())]
    parts.firing(found, place.run, known=not (own.problem or general.problem))
    parts.resolved(found)
