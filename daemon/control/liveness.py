"""Liveness of ranks and runs: live, stale, lost, failed or finished, from the time since a rank's last message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tidegate.wire.base import Liveness
from tidegate.wire.run import Breakdown

STALE_LEASES: Final = 3
"""A rank is lost if its last message is more than this number of lease durations ago."""
_WORST_FIRST: Final[tuple[Liveness, ...]] = ("failed", "lost", "stale", "live")


def liveness(silent_seconds: float, lease_seconds: float) -> Liveness:
    """The liveness of a rank: live until `lease_seconds` after its last message, then stale, and lost after
    `STALE_LEASES` times `lease_seconds` (counted from the last message, too)."""
    if silent_seconds <= lease_seconds:
        return "live"
    return "stale" if silent_seconds <= STALE_LEASES * lease_seconds else "lost"


def of_run(ranks: Iterable[Liveness], breakdown: Breakdown | None) -> Liveness:
    """The liveness of a run: the worst of its unfinished ranks; finished when all ranks have finished. While the run is
    broken and no rank is there: how it broke down."""
    states = set(ranks)
    if breakdown is not None and not states & {"live", "stale"}:
        return breakdown.liveness
    return next((state for state in _WORST_FIRST if state in states), "finished")
