"""What the model would choose for the run, with one press to see it in figures."""

from __future__ import annotations

import streamlit as st

from tidegate.dashboard import actions, desk, kept, markup, snippets, units
from tidegate.dashboard.feed import Snapshot
from tidegate.dashboard.place import Place
from tidegate.wire.knobs import KnobsView
from tidegate.wire.prediction import Advice


def advice(place: Place, snapshot: Snapshot) -> None:
    """A sentence; with a change in it, a button that puts the change into the fields and previews it."""
    found = kept.ADVICE.get(place.url, (place.run, snapshot.knobs.generation))
    told = found.value.sentence if found.value else found.problem or "No advice yet."
    left, right = st.columns([4, 1], vertical_alignment="center")
    left.html(markup.title("Advice", "what the model would choose") + snippets.say(told))
    if found.value and found.value.changes:
        pressed = right.button(
            "Preview", key="preview_advice", disabled=not desk.token(), width="stretch",
            help="Puts it into the fields and asks what it would do. Nothing is changed.",
            on_click=_take, args=(place, found.value, snapshot.knobs),
        )  # fmt: skip
        if pressed:
            st.rerun()


def _take(place: Place, found: Advice, knobs: KnobsView) -> None:
    at = desk.desk(place.run)
    at.begin(knobs)
    fields = {name: units.knob(name, value) for name, value in found.changes.items() if name in knobs.bounds}
    at.fill(fields, "as the model advises")
    actions.preview(place.url, place.run, knobs.bounds)
