"""Page Alerts: the firing and resolved alerts of a run with their remedies, and the run's audit log."""

from __future__ import annotations

import streamlit as st

from tidegate.dashboard.data import queries, read_cache
from tidegate.dashboard.data.firing_alerts import NO_RUN
from tidegate.dashboard.data.step_stats import digest
from tidegate.dashboard.session.page_context import Place, live, told
from tidegate.dashboard.style import markup, palette, snippets
from tidegate.dashboard.widgets import alerts as parts
from tidegate.dashboard.widgets import audit, header


def alerts(place: Place) -> None:
    st.html(snippets.STYLE)
    _firing(place)
    with told():
        audit.audit(place)


@live
def _firing(place: Place) -> None:
    look = queries.look(place.url, place.run, place.rank)
    if look.snapshot is None:
        header.unread(place, look)
        return
    header.brief(look, look.snapshot, digest(look.snapshot.steps))
    own, general = (read_cache.ALERTS.get(place.url, run) for run in (place.run, NO_RUN))
    for reading, whose in ((own, f"of {place.run}"), (general, "that concern no run")):
        if reading.problem and not look.problem:
            sentence = f"Alerts {whose} are not known as of now: {reading.problem}"
            st.html(markup.banner(sentence, palette.LIVENESS["lost"]))
    found = [*(own.value or ()), *(general.value or ())]
    parts.firing(found, place.run, known=not (own.problem or general.problem))
    parts.resolved(found)
