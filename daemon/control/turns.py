"""Turns: run the control plane's decisions one at a time, without blocking the event loop during database writes.

The control plane decides in synchronous code that stores a decision before it makes the decision visible. A turn runs
such code: at each call of the store the code is suspended until a thread has done the work. There is one turn at a
time, so decisions stay atomic. Requests that only read need no turn, and see only decisions that are stored.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, ParamSpec, TypeVar

from sqlalchemy.exc import OperationalError
from sqlalchemy.util.concurrency import greenlet_spawn

from tidegate.daemon.problems import ProblemError
from tidegate.daemon.storage.engines import WAIT_SECONDS, is_busy
from tidegate.daemon.storage.store import Store

P = ParamSpec("P")
T = TypeVar("T")

TURN_SECONDS: Final = 4.0
"""Longest time that a request waits for its turn, in seconds: less than the 5 s for which agents wait for a
response."""
TRY_SECONDS: Final = 0.02
"""Pause between two tries to get a write lock that another process holds."""


class Turns:
    """The turns of one store: a mutex for decisions, with retries while the database is locked."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        self._num_waiting = 0

    async def do(self, decide: Callable[P, T], /, *args: P.args, **more: P.kwargs) -> T:
        """Calls `decide` in a turn and returns its result.

        While another process holds the database's write lock, `decide` is called again for up to `WAIT_SECONDS`, with
        turns of other callers in between. So `decide` must change nothing if its first write fails. If `decide` could
        not get the lock in that time, this method raises OperationalError, and each later turn calls `decide` only
        once, until a turn has obtained the lock.
        """
        timeout, deadline = self._store.lock_timeout, time.monotonic() + WAIT_SECONDS
        while True:
            if self._lock.locked() or self._num_waiting:
                await self._wait_for_lock()
            else:
                await self._lock.acquire()  # returns at once, and costs no timer
            timeout.at_once = True
            try:
                return await greenlet_spawn(functools.partial(decide, *args, **more))
            except OperationalError as error:
                if not is_busy(error):
                    raise
                if timeout.gave_up or time.monotonic() >= deadline:
                    timeout.gave_up = True
                    raise
            finally:
                timeout.at_once = False
                self._lock.release()
            await asyncio.sleep(TRY_SECONDS)

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Context manager for the shutdown: waits for the end of the present turn, and lets no other turn start."""
        async with self._lock:
            yield

    async def _wait_for_lock(self) -> None:
        """Acquires the lock of turns, after the callers that already wait for it.

        Raises ProblemError 503 after `TURN_SECONDS`.
        """
        self._num_waiting += 1
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._lock.acquire()
        except TimeoutError:
            detail = (
                f"The database did not take earlier changes within {TURN_SECONDS:g} s: nothing was changed, try again."
            )
            raise ProblemError(503, "store-busy", detail) from None
        finally:
            self._num_waiting -= 1
