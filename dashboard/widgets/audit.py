"""Audit log of a run as a table, filtered by text, action and author."""

from __future__ import annotations

from typing import Final

import streamlit as st

from tidegate import units
from tidegate.dashboard.data import audit_filter, read_cache
from tidegate.dashboard.data.audit_filter import AuditFilter
from tidegate.dashboard.session import links
from tidegate.dashboard.session.page_context import PageContext, refreshed
from tidegate.dashboard.style import markup, palette, snippets
from tidegate.wire.audit import AuditRow

SHOWN: Final = 100
DEPTHS: Final = (500, 5_000)
COLUMNS: Final = ("when", "who", "what", "gen.", "change", "why", "effect")
_BAD: Final = ("refused", "aborted", "superseded", "condemned", "failed", "alert_firing")
_GOOD: Final = ("applied", "promoted", "alert_resolved")


def audit(context: PageContext) -> None:
    """Draws the filters and the rows that they accept. Only the rows refresh. The filters are stored in the query of
    the page's address."""
    known = read_cache.AUDIT.get(context.url, (context.run, DEPTHS[0])).value or []
    st.html(markup.title("Audit log", "append-only; every change of knobs and every alert"))
    asked = st.query_params
    words, what, who, depth = st.columns([4, 4, 3, 2], vertical_alignment="bottom")
    text = words.text_input("Words", key=_key(context, "words", asked.get("q", "")), placeholder="Words in any column")
    there, people = sorted({row.action for row in known}), sorted({row.actor for row in known})
    wanted = [action for action in asked.get("what", "").split(",") if action in there]
    picked = what.multiselect(
        "What", there, key=_key(context, "what", wanted), format_func=audit_filter.action_text, placeholder="Everything"
    )
    first = asked["who"] if asked.get("who") in people else None
    actor = who.selectbox("Who", people, index=None, key=_key(context, "who", first), placeholder="Everybody")
    limit = depth.selectbox(
        "Look through",
        DEPTHS,
        key=f"audit_depth:{context.run}",
        format_func=lambda rows: f"newest {units.integer(rows)}",
    )
    found = AuditFilter(text=text or "", actions=frozenset(picked), actor=actor or "")
    links.remember(
        {"q": found.text or None, "what": ",".join(sorted(found.actions)) or None, "who": found.actor or None}
    )
    _rows(context, found, limit)


@refreshed
def _rows(context: PageContext, wanted: AuditFilter, limit: int) -> None:
    reading = read_cache.AUDIT.get(context.url, (context.run, limit))
    if reading.value is None:
        st.html(snippets.nothing(reading.problem or "Nothing was read yet."))
        return
    found = audit_filter.filtered(reading.value, wanted)
    if not found:
        none = "No row says that." if reading.value else "Nothing was written yet: no knob was changed, no alert fired."
        st.html(snippets.nothing(none))
        return
    seen = f"{len(found)} of {len(reading.value)} rows" + (f", newest {SHOWN} shown" if len(found) > SHOWN else "")
    table = markup.table(COLUMNS, map(_cells, found[:SHOWN]), left=range(7), wide=(1, 4, 5, 6))
    st.html(f'<div class="tg-muted" style="font-size:0.78rem">{seen}</div>{table}')


def _cells(row: AuditRow) -> tuple[str, ...]:
    color = "lost" if row.action in _BAD else "live" if row.action in _GOOD else "finished"
    return (
        units.moment(row.timestamp),
        row.actor,
        markup.dot(audit_filter.action_text(row.action), palette.LIVENESS[color]),
        "" if row.generation is None else str(row.generation),
        audit_filter.change(row),
        row.reason,
        row.effect,
    )


def _key(context: PageContext, name: str, value: object) -> str:
    return links.field_key(f"audit_{name}:{context.run}", value)
