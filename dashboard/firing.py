"""What fires in all runs and in none of them, as far as the daemon answers; and whether that is all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidegate.dashboard import kept
from tidegate.errors import DaemonUnreachable, NotFound
from tidegate.wire import AlertView

NO_RUN = ""


@dataclass(frozen=True, kw_only=True)
class Firing:
    """Alerts by run; those that concern none are under the empty name. `problem`: why some may be missing."""

    by_run: Mapping[str, tuple[AlertView, ...]]
    problem: str | None = None

    def of(self, run: str) -> tuple[AlertView, ...]:
        return self.by_run.get(run, ())


def firing(url: str, runs: Iterable[str]) -> Firing:
    """Asks for each run, every few seconds at most. A run that is gone has none; a daemon that does not answer is not
    asked again and again."""
    found: dict[str, tuple[AlertView, ...]] = {}
    problem = None
    for run in (NO_RUN, *runs):
        reading = kept.ALERTS.get(url, run)
        if isinstance(reading.error, NotFound):
            continue
        found[run] = tuple(reading.value or ())
        problem = problem or reading.problem
        if isinstance(reading.error, DaemonUnreachable):
            break
    return Firing(by_run=found, problem=problem)
