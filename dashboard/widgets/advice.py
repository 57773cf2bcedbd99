"""Knob advice of the model for the run, with a button for a preview."""

from __future__ import annotations

import streamlit as st

from tidegate import units
from tidegate.dashboard.data import read_cache
from tidegate.dashboard.data.queries import Snapshot
from tidegate.dashboard.session import actions, edit_session
from tidegate.dashboard.session.page_context import PageContext
from tidegate.dashboard.style import markup, snippets
from tidegate.wire.knobs import KnobsView
from tidegate.wire.prediction import Advice


def advice(context: PageContext, snapshot: Snapshot) -> None:
    """Draws the model's advice as a sentence. If it recommends a change of knobs, also draws a button that fills the
    fields with the change and requests a preview."""
    found = read_cache.ADVICE.get(context.url, (context.run, snapshot.knobs.generation))
    text = found.value.sentence if found.value else found.problem or "No advice yet."
    left, right = st.columns([4, 1], vertical_alignment="center")
    left.html(markup.title("Advice", "what the model would choose") + snippets.say(text))
    if found.value and found.value.changes:
        pressed = right.button(
            "Preview", key="preview_advice", disabled=not edit_session.token(), width="stretch",
            help="Puts it into the fields and asks what it would do. Nothing is changed.",
            on_click=_take, args=(context, found.value, snapshot.knobs),
        )  # fmt: skip
        if pressed:
            st.rerun()


def _take(context: PageContext, found: Advice, knobs: KnobsView) -> None:
    at = edit_session.state_of(context.run)
    at.begin(knobs)
    fields = {name: units.knob(name, value) for name, value in found.changes.items() if name in knobs.bounds}
    at.fill(fields, "as the model advises")
    actions.preview(context.url, context.run, knobs.bounds)
