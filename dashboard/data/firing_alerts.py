"""Firing alerts of all runs, and those that concern no run in particular; and whether the list is complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate.dashboard.data import read_cache
from tidegate.wire.alert import AlertView

NO_RUN = ""


@dataclass(frozen=True, kw_only=True)
class Firing:
    """Firing alerts by run name; alerts that concern no run have the empty name. `problem`: why alerts may be missing,
    None if the list is complete."""

    by_run: Mapping[str, Sequence[AlertView]]
    problem: str | None = None

    def of(self, run: str) -> Sequence[AlertView]:
        return self.by_run.get(run, ())


def firing(url: str) -> Firing:
    """The firing alerts of all runs, and those that concern no run. They are read from the daemon with one request, at
    most every 5 seconds."""
    reading = read_cache.FIRING.get(url)
    by_run: defaultdict[str, list[AlertView]] = defaultdict(list)
    for alert in reading.value or ():
        by_run[alert.run].append(alert)
    return Firing(by_run=by_run, problem=reading.problem)
