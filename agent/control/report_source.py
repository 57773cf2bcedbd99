"""What the link to the daemon needs from its owner: reports, and a check of proposed knobs."""

from __future__ import annotations

from typing import Protocol

from tidegate.knobs.knobs import Knobs
from tidegate.wire.agent import AgentReport


class ReportSource(Protocol):
    """Owner of a link. Its methods are called by the threads of the link."""

    def report(self) -> AgentReport:
        """Builds the report of everything since the last report."""

    def undelivered(self, report: AgentReport) -> None:
        """Takes back a report that could not be delivered."""

    def check(self, knobs: Knobs) -> None:
        """ConfigError when the knobs cannot work on this rank."""
