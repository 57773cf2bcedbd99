"""Whether the database takes changes, found out by one, at most once a second however many ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from sqlalchemy.exc import OperationalError, SQLAlchemyError

from tidegate.daemon.storage.database_file import why_unusable
from tidegate.daemon.storage.store import Store, is_busy

KEPT_SECONDS: Final = 1.0
BUSY: Final = "Another process holds the write lock of the database: changes wait."


class Readiness:
    """Of one store. Who asks while it is being found out waits for the same answer."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = asyncio.Lock()
        self._found: str | None = None
        self._found_at = -KEPT_SECONDS

    async def why_not(self) -> str | None:
        """None where changes are taken, else the reason as a sentence."""
        async with self._lock:
            if self._clock() - self._found_at >= KEPT_SECONDS:
                self._found = await asyncio.to_thread(self._look)
                self._found_at = self._clock()
            return self._found

    def _look(self) -> str | None:
        try:
            self._store.probe()
        except SQLAlchemyError as error:
            if isinstance(error, OperationalError) and is_busy(error):
                return BUSY
            return why_unusable(error) or "The database does not answer."
        return None
