"""What fires in the run, beside the knobs: how bad, its figures, what to turn, where to read on."""

from __future__ import annotations

import time
from html import escape
from typing import Final

import streamlit as st

from tidegate.dashboard import markup, palette, units
from tidegate.dashboard.feed import Snapshot
from tidegate.wire import AlertView

COLORS: Final = {
    "critical": palette.LIVENESS["lost"], "warning": palette.LIVENESS["stale"], "info": palette.PHASE["forward"]
}  # fmt: skip
"""Worst first."""
SHOWN: Final = 12


def alerts(snapshot: Snapshot) -> None:
    """Nothing at all while nothing fires: the screen is for what is."""
    order = list(COLORS)
    firing = sorted(
        (alert for alert in snapshot.alerts if alert.state == "firing"),
        key=lambda a: (order.index(a.severity) if a.severity in order else len(order), a.starts_at),
    )
    if not firing:
        return
    rows = [_row(alert, time.time()) for alert in firing[:SHOWN]]
    note = f"worst {SHOWN} of {len(firing)}" if len(firing) > SHOWN else "as Alertmanager tells"
    columns = ("alert", "what", "for", "knob to turn", "runbook")
    st.html(markup.title("Alerts", note) + markup.table(columns, rows, left=(0, 1, 3, 4), wide=(1,)))


def _row(alert: AlertView, now: float) -> tuple[str, ...]:
    return (
        markup.dot(alert.alert.removeprefix("Tidegate"), COLORS.get(alert.severity, palette.GREY)),
        alert.summary.removeprefix(alert.run).lstrip(": "),
        units.age(max(0.0, now - alert.starts_at)),
        alert.knob or units.NONE,
        runbook(alert.runbook_url),
    )


def runbook(url: str) -> str:
    """A link where it is an address of the web; else what it says, for there is nothing to open."""
    if not url.startswith(("https://", "http://")):
        return url or units.NONE
    return markup.Raw(f'<a href="{escape(url)}" target="_blank" rel="noreferrer">runbook</a>')
