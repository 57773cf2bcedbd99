"""Page Alerts: the firing and resolved alerts of a run with their remedies, and the run's audit log."""

from __future__ import annotations

import streamlit as st

from tidegate.dashboard.data import read_cache
from tidegate.dashboard.session.page_context import PageContext, errors_shown, refreshed
from tidegate.dashboard.style import markup, snippets
from tidegate.dashboard.widgets import alerts as parts
from tidegate.dashboard.widgets import audit, header


def alerts(context: PageContext) -> None:
    st.html(snippets.STYLE)
    _firing(context)
    with errors_shown():
        audit.audit(context)


@refreshed
def _firing(context: PageContext) -> None:
    snapshot_reading = header.header(context)
    if snapshot_reading.value is None:
        return
    own, general = (read_cache.ALERTS.get(context.url, run) for run in (context.run, read_cache.NO_RUN))
    for reading, whose in ((own, f"of {context.run}"), (general, "that concern no run")):
        if reading.problem and not snapshot_reading.problem:
            st.html(markup.banner(f"Alerts {whose} are not known as of now: {reading.problem}"))
    found = [*(own.value or ()), *(general.value or ())]
    parts.firing(found, context.run, known=not (own.problem or general.problem))
    parts.resolved(found)
