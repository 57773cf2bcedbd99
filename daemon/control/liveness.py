"""How long the daemon believes in a rank that says nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tidegate.wire.base import Liveness

STALE_LEASES: Final = 3
_WORST_FIRST: Final[tuple[Liveness, ...]] = ("lost", "stale", "live")


def liveness(silent_seconds: float, lease_seconds: float) -> Liveness:
    """Live while the lease holds, stale for up to three leases, then lost."""
    if silent_seconds <= lease_seconds:
        return "live"
    return "stale" if silent_seconds <= STALE_LEASES * lease_seconds else "lost"


def of_run(ranks: Iterable[Liveness]) -> Liveness:
    """The worst of the ranks that have not finished; finished when all have."""
    found = set(ranks)
    return next((state for state in _WORST_FIRST if state in found), "finished")
