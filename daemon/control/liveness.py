"""Liveness of ranks and runs: live, stale, lost or finished, from the time since a rank's last message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tidegate.wire.base import Liveness

STALE_LEASES: Final = 3
"""A rank is lost if its last message is more than this number of lease durations ago."""
_WORST_FIRST: Final[tuple[Liveness, ...]] = ("lost", "stale", "live")


def liveness(silent_seconds: float, lease_seconds: float) -> Liveness:
    """The liveness of a rank: live until `lease_seconds` after its last message, then stale, and lost after
    `STALE_LEASES` times `lease_seconds` (counted from the last message, too)."""
    if silent_seconds <= lease_seconds:
        return "live"
    return "stale" if silent_seconds <= STALE_LEASES * lease_seconds else "lost"


def of_run(ranks: Iterable[Liveness]) -> Liveness:
    """The liveness of a run: the worst of its unfinished ranks; finished when all ranks have finished."""
    states = set(ranks)
    return next((state for state in _WORST_FIRST if state in states), "finished")
