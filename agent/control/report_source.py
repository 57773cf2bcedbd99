"""Interface of the object from which the link to the daemon gets reports, and which checks proposed knobs."""

from __future__ import annotations

from typing import Protocol

from tidegate.knobs.knobs import Knobs
from tidegate.wire.agent import AgentReport


class ReportSource(Protocol):
    """Interface of the object that builds the reports of a link. The threads of the link call its methods."""

    def report(self) -> AgentReport:
        """Builds the next report: the steps since the last report, and the present phase, knobs and rates."""

    def undelivered(self, report: AgentReport) -> None:
        """Takes back a report that was not delivered, so that its steps are in the next report."""

    def check(self, knobs: Knobs) -> None:
        """Raises ConfigError when the knobs cannot work on this rank."""
