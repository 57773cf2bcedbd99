"""Numbers of events: each larger than all before, those of earlier daemons included, whatever the clock says."""

from __future__ import annotations

from typing import Final

from tidegate.daemon.storage.store import Store

RESERVED: Final = 1 << 20
"""Numbers that are taken from the store at once: a write for each event would be one for each report of a rank."""


class EventIds:
    """Takes numbers from the store's counter. What a daemon that was killed had reserved and not used is left out."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next = self._end = 0

    def take(self) -> int:
        """The next number."""
        if self._next == self._end:
            self._reserve()
        self._next += 1
        return self._next - 1

    def refill(self) -> None:
        """Reserves more in good time, so that no event waits for it; to be called now and then."""
        if self._end - self._next < RESERVED // 2:
            self._reserve()

    def _reserve(self) -> None:
        first = self._store.reserve("events", RESERVED)
        self._next, self._end = max(self._next, first), first + RESERVED
