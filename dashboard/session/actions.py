"""Actions of the buttons on the page Tune: each sends a request with the viewer's token, and shows a notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tidegate.client.daemon_client import DaemonClient
from tidegate.dashboard.data import knob_edits, knob_preview, queries
from tidegate.dashboard.session import edit_session
from tidegate.dashboard.session.edit_session import EditState
from tidegate.errors import DaemonError, DaemonUnreachable, KnobError, NotAuthorized, StaleKnobs
from tidegate.knobs.knobs import KnobValue
from tidegate.wire.canary import CanaryRequest
from tidegate.wire.knobs import GenerationView, KnobBound, KnobsView

WAIT_SECONDS: Final = 2.0
"""Longest time to wait for the ranks to accept or refuse new knobs after a button is pressed. Later answers appear on
the page."""
NOT_SET: Final = "Not set"
TIMEOUT_SECONDS: Final = 10.0
"""Timeout of a request; a preview of many subgroups takes some seconds."""


def preview(url: str, run: str, bounds: Mapping[str, KnobBound]) -> None:
    """Requests a preview of the edits, and shows its headline as notice; changes no knob."""
    at = edit_session.state_of(run)
    changes = _changes(at, bounds)
    if changes is None:
        return

    def ask(client: DaemonClient) -> None:
        at.preview = client.preview_knobs(run, changes, at.generation)
        at.notice = ("info", knob_preview.headline(at.preview))

    _ask(url, run, at, ask, "No preview")


def set_knobs(url: str, run: str, bounds: Mapping[str, KnobBound]) -> None:
    """Sends the edits as a new generation, on trial if the viewer wants that. Refused edits stay in the fields."""
    at = edit_session.state_of(run)
    changes = _changes(at, bounds)
    if changes is None:
        return
    canary = CanaryRequest(steps=at.trial_steps) if at.trial else None

    def ask(client: DaemonClient) -> None:
        made = client.set_knobs(
            run, changes, generation=at.generation, reason=at.reason.strip(), wait=WAIT_SECONDS, canary=canary
        )
        _made(at, made, client.knobs(run))

    _ask(url, run, at, ask)


def roll_back(url: str, run: str, to: int, reason: str) -> None:
    """Restores the knobs of generation `to`, independent of the edits."""
    at = edit_session.state_of(run)

    def ask(client: DaemonClient) -> None:
        made = client.roll_back(run, to, reason=reason.strip(), wait=WAIT_SECONDS)
        good, sentence = knob_edits.outcome(made)
        at.notice = ("success" if good else "error", f"Back to the knobs of generation {to}. {sentence}")
        at.begin(client.knobs(run))

    _ask(url, run, at, ask)


def keep_token(url: str, knobs: KnobsView, given: str) -> None:
    """Stores the token in this session. If the daemon rejects the token, a notice is shown instead."""
    at = edit_session.state_of(knobs.run)
    at.notice = None
    name = next(iter(knobs.bounds))
    nothing = {name: knobs.desired[name]} if name in knobs.desired else {}
    if not given.strip() or not nothing:
        edit_session.keep_token(given)
        return
    try:
        with DaemonClient(url, given.strip(), TIMEOUT_SECONDS) as client:
            client.preview_knobs(knobs.run, nothing, knobs.generation)
    except NotAuthorized as error:
        at.notice = ("error", f"The daemon does not accept this operate token. ({error})")
        return
    except (DaemonError, KnobError):
        pass  # the token was accepted; other errors appear at the next request
    edit_session.keep_token(given)


def _made(at: EditState, made: GenerationView, now: KnobsView) -> None:
    """Updates the edits and the notice after the daemon has made a generation from the edits.

    at: the viewer's editing state. made: the new generation. now: the knobs of the run after that.
    """
    good, sentence = knob_edits.outcome(made)
    seen = at.preview
    if good and seen is not None and seen.generation == at.generation and seen.changed == made.changes:
        before, after = seen.predicted_update_seconds_before, seen.predicted_update_seconds_after
        if before is not None and after is not None:
            at.predicted[made.generation] = (before, after)
    if good:
        at.clear()
        sentence += " It is on trial: this page shows its progress." if made.canary else ""
    else:
        sentence += " Your edit is kept."
    at.base_on(now)
    at.notice = ("success" if good else "error", sentence)


def _changes(at: EditState, bounds: Mapping[str, KnobBound]) -> dict[str, KnobValue] | None:
    """The changes that the edits make; None, with a notice, if there is nothing to send or an edit is invalid."""
    parsed = knob_edits.parse(at.draft, bounds)
    if parsed.errors:
        at.notice = ("error", " ".join(parsed.errors.values()))
        return None
    if not parsed.changes:
        typed = "every field is as the run has it" if at.draft.edited() else "no field holds anything"
        at.notice = ("info", f"Nothing to set: {typed}.")
        return None
    return parsed.changes


def _ask(url: str, run: str, at: EditState, ask: Callable[[DaemonClient], None], failed: str = NOT_SET) -> None:
    """Sends a request; an error becomes a notice that begins with `failed`."""
    try:
        with DaemonClient(url, edit_session.token(), TIMEOUT_SECONDS) as client:
            ask(client)
    except StaleKnobs:
        _conflict(url, run, at)
    except NotAuthorized as error:
        at.notice = ("error", f"{failed}: the daemon does not accept this operate token. Your edit is kept. ({error})")
    except DaemonUnreachable as error:
        begin = "It is not known whether this was set" if failed == NOT_SET else failed
        at.notice = ("error", f"{begin}: {error} Your edit is kept.")
    except (DaemonError, KnobError) as error:
        why = error or f"the daemon at {url} answered with an error."
        at.notice = ("error", f"{failed}: {why} Your edit is kept.")


def _conflict(url: str, run: str, at: EditState) -> None:
    """Handles a conflict with another change: the edit is kept, and now refers to the newest generation."""
    draft = at.draft
    try:
        now, generations = queries.fresh_knobs(url, run)
    except DaemonError as error:
        at.notice = ("error", f"Not set: the knobs were changed meanwhile, and then {error} Your edit is kept.")
        return
    at.notice, at.preview = ("warning", knob_edits.conflict(draft, generations)), None
    at.base_on(now)
