"""Cards of firing alerts (severity, age, figures, knob to turn, runbook), and the table of resolved alerts."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

import streamlit as st

from tidegate import units
from tidegate.dashboard.session import links
from tidegate.dashboard.style import markup, palette, snippets
from tidegate.wire.alert import AlertView

COLORS: Final = {
    "critical": palette.LIVENESS["lost"], "warning": palette.LIVENESS["stale"], "info": palette.PHASE["forward"]
}  # fmt: skip
"""Colour of each severity of an alert. The order of the keys is from the worst severity to the mildest."""
SHOWN: Final = 12
RESOLVED_SHOWN: Final = 20
_RUNBOOK: Final = re.compile(r"docs/runbooks/([A-Za-z0-9]{1,64}\.md)")
_NEIGHBOUR: Final = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")
_RUNBOOKS: Final = Path(__file__).resolve().parents[2] / "docs" / "runbooks"
"""Folder of the runbooks; it exists only if the live view runs from a copy of the repository."""


def firing(alerts: Sequence[AlertView], run: str, *, known: bool) -> None:
    """Draws a card for each firing alert, worst first, for `SHOWN` alerts at most. known: the list is complete and up
    to date; if not, an empty list does not mean that nothing fires, and the text says so."""
    found = worst_first([alert for alert in alerts if alert.state == "firing"])
    st.html(markup.title("Firing", f"worst {SHOWN} of {len(found)}" if len(found) > SHOWN else "as Alertmanager tells"))
    if not found:
        st.html(snippets.nothing("Nothing fires." if known else "Whether anything fires is not known."))
    for alert in found[:SHOWN]:
        _card(alert, run)


def resolved(alerts: Sequence[AlertView]) -> None:
    """Draws the resolved alerts, newest first; nothing if there are none."""
    found = sorted((a for a in alerts if a.state == "resolved"), key=lambda a: -(a.ends_at or 0.0))
    if not found:
        return
    now = time.time()
    rows = [
        (
            markup.dot(_name(alert), color(alert)),
            _summary(alert),
            f"{units.age(now - (alert.ends_at or now))} ago",
            units.duration(max(0.0, (alert.ends_at or now) - alert.starts_at)),
            _knob(alert),
            runbook(alert.runbook_url),
        )
        for alert in found[:RESOLVED_SHOWN]
    ]
    columns = ("alert", "what", "resolved", "fired for", "knob", "runbook")
    note = f"newest {RESOLVED_SHOWN} of {len(found)}" if len(found) > RESOLVED_SHOWN else ""
    st.html(markup.title("Resolved", note) + markup.table(columns, rows, left=(0, 1, 2, 3, 4, 5), wide=(1,)))


def worst_first(alerts: Sequence[AlertView]) -> list[AlertView]:
    """The alerts by severity, then by start."""
    order = list(COLORS)
    return sorted(
        alerts, key=lambda a: (order.index(a.severity) if a.severity in order else len(order), a.starts_at)
    )  # fmt: skip


def color(alert: AlertView) -> str:
    return COLORS.get(alert.severity, palette.GREY)


def runbook(url: str) -> str:
    """The runbook of an alert as a table cell: a link if `url` is a web address, else `url` as text; a dash if `url` is
    empty."""
    if not url.startswith(("https://", "http://")):
        return url or units.NONE
    return markup.Raw(f'<a href="{escape(url)}" target="_blank" rel="noreferrer">runbook</a>')


def own_runbook(url: str) -> str | None:
    """The Markdown text of one of Tidegate's own runbooks, with relative links changed to plain text. None if `url` is
    not one of them, or if the live view does not run from a copy of the repository."""
    found = _RUNBOOK.fullmatch(url)
    path = _RUNBOOKS / found[1] if found else None
    return _NEIGHBOUR.sub(r"\1", path.read_text()) if path is not None and path.is_file() else None


def _card(alert: AlertView, run: str) -> None:
    since = units.age(max(0.0, time.time() - alert.starts_at))
    head = f"{markup.dot(alert.severity or 'no severity', color(alert))} <b>{escape(_name(alert))}</b>"
    with st.container(key=f"alert:{alert.fingerprint}"):
        left, right = st.columns([5, 1], vertical_alignment="center")
        left.html(
            f'<div class="tg-card" style="border-left-color:{color(alert)}">{head} '
            f'<span class="tg-muted">for {since}</span><p>{escape(_summary(alert))}</p>'
            f'<p class="tg-muted">{escape(alert.description)}</p><p>{_remedy(alert)}</p></div>'
        )
        with right:
            if run and _knob(alert) != "no knob helps":
                links.page_link("tune", f"Turn {alert.knob}", run=run)
            text = own_runbook(alert.runbook_url)
            if text is not None:
                with st.popover("Runbook"):
                    st.markdown(text)


def _remedy(alert: AlertView) -> str:
    own = own_runbook(alert.runbook_url) is not None
    book = "" if own or not alert.runbook_url else f" · {escape_unless_raw(runbook(alert.runbook_url))}"
    return f"Knob to turn: <b>{escape(_knob(alert))}</b>{book}"


def escape_unless_raw(text: str) -> str:
    return text if isinstance(text, markup.Raw) else escape(text)


def _knob(alert: AlertView) -> str:
    return alert.knob if alert.knob not in ("", "none") else "no knob helps"


def _name(alert: AlertView) -> str:
    return alert.alert.removeprefix("Tidegate")


def _summary(alert: AlertView) -> str:
    return alert.summary.removeprefix(alert.run).lstrip(": ")
