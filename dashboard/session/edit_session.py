"""What a viewer has at hand while turning knobs: token, edits, preview. In the server's memory, nowhere else."""

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
class Desk:
    """One run's. Widgets come and go with their page; what was typed into them stays here."""

    generation: int | None = None
    """The newest that the viewer had before them when they began to edit; If-Match names it."""
    desired: dict[str, KnobValue] = field(default_factory=dict)
    edits: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    trial: bool = False
    trial_steps: int = TRIAL_STEPS
    filling: int = 0
    """Counts how often the fields were filled or emptied by us. A browser that has not heard of it yet still sends what
    was in the old fields, and that must not pass for an edit: the count is in their keys, and edits of old ones are
    dropped."""
    notice: tuple[Tone, str] | None = None
    preview: KnobPreview | None = None
    predicted: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Update seconds before and after that were predicted of a generation, when it was previewed and then set."""

    def begin(self, knobs: KnobsView) -> None:
        """The viewer has these knobs before them. What was typed before stays on those that it was typed against; what
        was typed for knobs that the run has no more (it began again without paths, say) is dropped."""
        if gone := sorted(self.draft.edited() - knobs.bounds.keys()):
            self.notice = ("info", f"This run has no {', '.join(gone)} any more; what you typed there is dropped.")
            self.preview = None
        for name in self.edits.keys() - knobs.bounds.keys():
            del self.edits[name]
        if self.generation is None or (knobs.generation > self.generation and not self.draft.edited()):
            self.base_on(knobs)

    def base_on(self, knobs: KnobsView) -> None:
        """What was typed is for these knobs from now on."""
        self.generation, self.desired = knobs.generation, dict(knobs.desired)

    @property
    def draft(self) -> Draft:
        return Draft(generation=self.generation or 0, desired=self.desired, fields=self.edits)

    def clear(self) -> None:
        """Forgets what was typed."""
        self.edits.clear()
        self.reason, self.preview = "", None
        self.filling += 1

    def fill(self, fields: Mapping[str, str], reason: str) -> None:
        """Types for the viewer; a reason that was given stays."""
        self.edits.update(fields)
        self.reason = self.reason or reason
        self.filling += 1


def desk(run: str) -> Desk:
    """This viewer's desk for `run`."""
    found: Desk = st.session_state.setdefault(f"desk:{run}", Desk())
    return found


def token() -> str:
    """The operate token that the viewer gave, else the one of the browser's; empty while the page is read-only."""
    return str(st.session_state.get(TOKEN, "")) or _of_browser()


def keep_token(given: str) -> None:
    st.session_state[TOKEN] = given.strip()


def forget_token() -> None:
    """The page is read-only again, in all tabs where a link had opened it."""
    keep_token("")
    headers = _headers()
    if browser_sessions.same_origin(headers):
        browser_sessions.only_look(headers.get("host", ""), st.context.cookies.to_dict())


def _of_browser() -> str:
    """The operate token of the browser's session; empty where it has none. A page of another origin has none."""
    headers = _headers()
    if not browser_sessions.same_origin(headers):
        return ""
    found = browser_sessions.find(headers.get("host", ""), st.context.cookies.to_dict())
    return found.operate if found is not None else ""


def _headers() -> dict[str, str]:
    return {name.lower(): value for name, value in st.context.headers.items()}
