"""Event ids: each is larger than all ids before, across restarts of the daemon and changes of the clock."""

from __future__ import annotations

from typing import Final

from tidegate.daemon.storage.store import Store

RESERVED: Final = 1 << 20
"""Numbers reserved from the store at once. Without a reserve each event, and so each report, would cost a write."""


class EventIds:
    """Gives ids from a counter in the store. Ids that a killed daemon had reserved and not used are skipped."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next = self._end = 0

    def take(self) -> int:
        """The next id."""
        if self._next == self._end:
            self._reserve()
        self._next += 1
        return self._next - 1

    def refill(self) -> None:
        """Reserves more ids early, so that no event waits for the store. Call it every half minute or so."""
        if self._end - self._next < RESERVED // 2:
            self._reserve()

    def _reserve(self) -> None:
        first = self._store.reserve("events", RESERVED)
        self._next, self._end = max(self._next, first), first + RESERVED
