"""Editing state of a viewer who changes knobs: token, edits and preview. It is in the server's memory only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import streamlit as st

from tidegate.dashboard.data.knob_edits import Draft
from tidegate.dashboard.session import browser_sessions
from tidegate.knobs.knobs import KnobValue
from tidegate.wire.canary import CanaryRequest
from tidegate.wire.knobs import KnobsView
from tidegate.wire.prediction import KnobPreview

Tone = Literal["error", "warning", "success", "info"]
TOKEN: Final = "operate_token"
TRIAL_STEPS: Final = CanaryRequest().steps


@dataclass(kw_only=True)
class EditState:
    """A viewer's editing state for one run. It is stored here, because Streamlit drops the values of input fields when
    the viewer leaves their page."""

    generation: int | None = None
    """The newest generation that the viewer saw when the edit began; sent as If-Match."""
    desired: dict[str, KnobValue] = field(default_factory=dict)
    edits: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    trial: bool = False
    trial_steps: int = TRIAL_STEPS
    filling: int = 0
    """Counts how often the program has filled or emptied the fields. A browser that has not been updated yet still
    sends the old fields, which must not count as edits. So the count is part of the fields' keys, and edits of fields
    with an old key are dropped."""
    notice: tuple[Tone, str] | None = None
    preview: KnobPreview | None = None
    predicted: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Predicted update seconds, before and after the change, by number of the generation. Only for generations whose
    change the viewer previewed before it was sent."""

    def begin(self, knobs: KnobsView) -> None:
        """Prepares the editing state before the page shows `knobs`. If there are no edits, the state then refers to the
        generation of `knobs`. If there are edits, it still refers to the generation that the viewer saw before
        the first edit.

        Edits of knobs that the run no longer has (for example after a restart without storage paths) are dropped.
        """
        if gone := sorted(self.draft.edited() - knobs.bounds.keys()):
            self.notice = ("info", f"This run has no {', '.join(gone)} any more; what you typed there is dropped.")
            self.preview = None
        for name in self.edits.keys() - knobs.bounds.keys():
            del self.edits[name]
        if self.generation is None or (knobs.generation > self.generation and not self.draft.edited()):
            self.base_on(knobs)

    def base_on(self, knobs: KnobsView) -> None:
        """Makes the edits refer to these knobs: changes are compared with them, and sent with their generation."""
        self.generation, self.desired = knobs.generation, dict(knobs.desired)

    @property
    def draft(self) -> Draft:
        return Draft(generation=self.generation or 0, desired=self.desired, fields=self.edits)

    def clear(self) -> None:
        """Drops all edits."""
        self.edits.clear()
        self.reason, self.preview = "", None
        self.filling += 1

    def fill(self, fields: Mapping[str, str], reason: str) -> None:
        """Fills fields by program, not by the viewer. `reason` is used only if the viewer has given none."""
        self.edits.update(fields)
        self.reason = self.reason or reason
        self.filling += 1


def state_of(run: str) -> EditState:
    """This viewer's editing state for `run`."""
    state: EditState = st.session_state.setdefault(f"desk:{run}", EditState())
    return state


def token() -> str:
    """The operate token that the viewer entered, else that of the browser's session; empty if the page is read-only."""
    return str(st.session_state.get(TOKEN, "")) or _of_browser()


def keep_token(given: str) -> None:
    st.session_state[TOKEN] = given.strip()


def forget_token() -> None:
    """Makes the page read-only again; for a browser session with the operate scope, in all its tabs."""
    keep_token("")
    headers = _headers()
    if browser_sessions.same_origin(headers):
        browser_sessions.make_read_only(headers.get("host", ""), st.context.cookies.to_dict())


def _of_browser() -> str:
    """The operate token of the browser's session; empty if it has none, or the page is of another origin."""
    headers = _headers()
    if not browser_sessions.same_origin(headers):
        return ""
    session = browser_sessions.find(headers.get("host", ""), st.context.cookies.to_dict())
    return session.operate if session is not None else ""


def _headers() -> dict[str, str]:
    return {name.lower(): value for name, value in st.context.headers.items()}
