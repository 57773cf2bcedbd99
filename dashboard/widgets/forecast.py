"""Table of a knob preview: measured, predicted for the present knobs, and predicted for the edited knobs."""

from __future__ import annotations

import streamlit as st

from tidegate import units
from tidegate.dashboard.data import knob_edits, knob_preview
from tidegate.dashboard.data.knob_preview import Line
from tidegate.dashboard.data.queries import Snapshot
from tidegate.dashboard.session import edit_session
from tidegate.dashboard.style import markup, palette, snippets

COLUMNS = ("", "measured", "predicted now", "predicted then", "change")


def preview(snapshot: Snapshot) -> None:
    """Draws the viewer's last preview; nothing if there was none."""
    seen = edit_session.state_of(snapshot.run.run).preview
    if seen is None:
        return
    asked = knob_edits.describe(seen.changed, seen.before)
    old = f"; made on generation {seen.generation}, now outdated" if seen.generation < snapshot.knobs.generation else ""
    rows = [_row(line) for line in knob_preview.lines(seen, snapshot.steps)]
    st.html(
        markup.title(f"Preview of {asked}", f"nothing was changed{old}")
        + snippets.say(knob_preview.headline(seen))
        + (markup.table(COLUMNS, rows) if rows else "")
    )


def _row(line: Line) -> tuple[str, ...]:
    name = snippets.indented(line.name) if line.part else line.name
    return (name, line.show(line.measured), line.show(line.now), line.show(line.then), _change(line.change))


def _change(share: float | None) -> str:
    """A relative change as HTML, in the colour for better (lower) or worse (higher)."""
    if share is None:
        return units.NONE
    if share == 0:
        return "none"
    return snippets.colored(units.change(share), palette.LIVENESS["live" if share < 0 else "lost"])
