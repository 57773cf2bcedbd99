"""Table of the run's generations (author, time, reason, result), and rollback to any generation that ran."""

from __future__ import annotations

import time
from typing import Final

import streamlit as st

from tidegate import units
from tidegate.dashboard.data import knob_edits, knob_preview
from tidegate.dashboard.data.queries import Snapshot
from tidegate.dashboard.session import actions, edit_session
from tidegate.dashboard.session.page_context import PageContext
from tidegate.dashboard.style import markup, palette
from tidegate.dashboard.widgets.knobs_now import BAD, change
from tidegate.dashboard.widgets.trial import STATES, predicted
from tidegate.wire.knobs import GenerationView

SHOWN: Final = 20
COLUMNS: Final = ("no.", "state", "change", "when", "by", "reason", "outcome")


def history(context: PageContext, snapshot: Snapshot) -> None:
    """Draws the newest generations, newest first, and the rollback button."""
    made = list(snapshot.generations)[::-1]
    note = f"newest {SHOWN} of {len(made)}" if len(made) > SHOWN else "each keeps all knobs, so that it can come back"
    left, right = st.columns([5, 1], vertical_alignment="bottom")
    left.html(markup.title("History", note))
    with right:
        _back(context, snapshot)
    now = time.time()
    rows = [
        (
            str(view.generation),
            markup.dot(view.state, _color(view)),
            change(view, snapshot.generations),
            f"{units.age(now - view.created_at)} ago",
            view.author,
            view.reason,
            outcome(view),
        )
        for view in made[:SHOWN]
    ]
    st.html(markup.table(COLUMNS, rows, left=(0, 1, 2, 3, 4, 5, 6), wide=(2, 5, 6)))


def outcome(view: GenerationView) -> str:
    """The reason why a generation was not applied, or its measured effect."""
    if view.state in BAD:
        return view.outcome
    parts = []
    if view.canary is not None:
        parts.append(STATES[view.canary.state])
    if view.measured_effect:
        parts.append(knob_preview.against(view.measured_effect, predicted(view)))
    elif view.applied:
        ranks = "one rank" if len(view.applied) == 1 else f"{len(view.applied)} ranks"
        parts.append(f"on {ranks} since step {units.integer(min(view.applied.values()))}")
    return "; ".join(parts) or view.outcome


def restorable(snapshot: Snapshot) -> list[GenerationView]:
    """Generations that ran, newest first, except generations with the run's present knobs."""
    now = snapshot.knobs.desired
    ran = [view for view in snapshot.generations if view.state in ("committed", "applied") or view.applied]
    return [view for view in reversed(ran) if dict(view.knobs) != dict(now)]


def _back(context: PageContext, snapshot: Snapshot) -> None:
    choices = {view.generation: view for view in restorable(snapshot)}
    allowed = bool(edit_session.token()) and bool(choices)
    why = None if allowed else "Needs the operate token." if choices else "No other generation has run."
    with st.popover("Roll back …", disabled=not allowed, help=why, width="stretch"):
        if not choices:
            return
        to = st.selectbox(
            "Bring back the knobs of generation", list(choices), key=f"back:{context.run}",
            format_func=lambda number: f"{number}: {knob_edits.describe(choices[number].knobs)}"
            if number in choices else str(number),
        )  # fmt: skip
        reason = st.text_input("Reason", key=f"back_reason:{context.run}", max_chars=500)
        st.caption("At once, as a new generation; it can be undone the same way.")
        if st.button("Roll back", key="roll_back", type="primary") and to is not None:
            actions.roll_back(context.url, context.run, to, reason)
            st.rerun()


def _color(view: GenerationView) -> str:
    return palette.LIVENESS["lost" if view.state in BAD else "live" if view.state == "applied" else "stale"]
