"""Result of the last change of knobs: its trial, and the measured effect compared with the prediction."""

from __future__ import annotations

import streamlit as st

from tidegate import units
from tidegate.dashboard.data import knob_preview
from tidegate.dashboard.data.queries import Snapshot
from tidegate.dashboard.session import edit_session
from tidegate.dashboard.style import markup, palette, snippets
from tidegate.dashboard.widgets.knobs_now import BAD, change
from tidegate.wire.canary import CanaryView
from tidegate.wire.knobs import GenerationView

STATES = {
    "waiting": "on trial", "promoted": "kept", "condemned": "harmful: going back", "rolled_back": "rolled back",
    "superseded": "trial ended by another change",
}  # fmt: skip


def last_change(snapshot: Snapshot) -> None:
    """Draws the result of one change of knobs: the one with an open trial, otherwise the newest that ran. Nothing if
    only the start-up settings have run."""
    ran = [view for view in snapshot.generations if view.applied and view.generation > 0 and view.state not in BAD]
    tried = next((v for v in reversed(ran) if v.canary and v.canary.state in ("waiting", "condemned")), None)
    found = tried or (ran[-1] if ran else None)
    if found is None:
        return
    st.html(
        markup.title(
            "What the last change did", f"generation {found.generation}: {change(found, snapshot.generations)}"
        )
        + (_trial(found, found.canary, snapshot) if found.canary else "")
        + snippets.say(effect(found))
    )


def effect(view: GenerationView) -> str:
    """The measured effect of a change of knobs compared with the predicted one, as a sentence. If the effect is not
    measured yet, says how many steps that takes."""
    if view.measured_effect is None:
        return "Not measured yet: that takes five steps with it, and some before."
    text = knob_preview.against(view.measured_effect, predicted(view))
    return text[0].upper() + text[1:] + "."


def predicted(view: GenerationView) -> tuple[float, float] | None:
    """The update times in seconds that the model predicted with the knobs before and after this change of knobs, from
    the stored trial or from this viewer's preview; None if there was neither."""
    trial = view.canary
    if trial and trial.predicted_update_seconds_before is not None and trial.predicted_update_seconds_after is not None:
        return trial.predicted_update_seconds_before, trial.predicted_update_seconds_after
    return edit_session.state_of(view.run).predicted.get(view.generation)


def progress(view: GenerationView, canary: CanaryView, snapshot: Snapshot) -> int:
    """Number of steps of the trial that all ranks have finished. The first step with the generation is not counted,
    because state moves in it."""
    done = [
        rank.step - view.applied[rank.rank] for rank in snapshot.run.ranks if rank.rank in view.applied
    ]  # fmt: skip
    return max(0, min(canary.steps, min(done, default=0)))


def _trial(view: GenerationView, canary: CanaryView, snapshot: Snapshot) -> str:
    color = {"waiting": "stale", "promoted": "live"}.get(canary.state, "lost")
    state = markup.dot(STATES[canary.state], palette.LIVENESS[color])
    if canary.state != "waiting":
        return snippets.say(state, canary.verdict)
    done = progress(view, canary, snapshot)
    bar = markup.bar(done / canary.steps, f"{done} of {canary.steps} steps", palette.LIVENESS["live"])
    rest = f"kept unless steps get slower by more than {units.share(canary.min_effect)}; else back to {canary.base}"
    return snippets.say(state, bar, rest)
