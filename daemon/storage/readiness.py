"""Readiness check: whether the database can be written. The result is cached for one second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from sqlalchemy.exc import OperationalError, SQLAlchemyError

from tidegate.daemon.storage.database_file import why_unusable
from tidegate.daemon.storage.engines import is_busy
from tidegate.daemon.storage.store import Store

KEPT_SECONDS: Final = 1.0
BUSY: Final = "Another process holds the write lock of the database: changes wait."


class Readiness:
    """The readiness of one store. Concurrent callers share one check."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = asyncio.Lock()
        self._reason: str | None = None
        self._checked_at = -KEPT_SECONDS

    async def why_not(self) -> str | None:
        """None if the database can be written, else the reason as a sentence."""
        async with self._lock:
            if self._clock() - self._checked_at >= KEPT_SECONDS:
                self._reason = await asyncio.to_thread(self._check)
                self._checked_at = self._clock()
            return self._reason

    def _check(self) -> str | None:
        try:
            self._store.test_write()
        except SQLAlchemyError as error:
            if isinstance(error, OperationalError) and is_busy(error):
                return BUSY
            return why_unusable(error) or "The database does not answer."
        return None
