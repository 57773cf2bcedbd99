"""Turns: what decides has one, and the event loop goes on while the database takes what was decided.

The control plane decides in synchronous code that stores before it shows. A turn runs such code: at each call of the
store it is suspended until a thread has done the work. One turn at a time, so that decisions stay atomic among each
other; questions need none, and see what was stored.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, ParamSpec, TypeVar

from sqlalchemy.exc import OperationalError
from sqlalchemy.util.concurrency import greenlet_spawn

from tidegate.daemon.problems import ProblemError
from tidegate.daemon.storage.store import WAIT_SECONDS, Store, is_busy

P = ParamSpec("P")
T = TypeVar("T")

TURN_SECONDS: Final = 4.0
"""How long one waits for those before; agents wait 5 s for an answer."""
TRY_SECONDS: Final = 0.02
"""Between two tries to take a write lock that another process holds."""


class Turns:
    """Those of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = asyncio.Lock()

    async def do(self, decide: Callable[P, T], /, *args: P.args, **more: P.kwargs) -> T:
        """What `decide` gives. It must leave everything as it was where its first write fails: while another process
        holds the database's write lock it is called again, between the turns of others, for `WAIT_SECONDS`. When that
        was in vain, nobody waits until one has had the lock.
        """
        timeout, loop = self._store.lock_timeout, asyncio.get_running_loop()
        deadline = loop.time() + WAIT_SECONDS
        while True:
            async with self._turn():
                timeout.at_once = True
                try:
                    return await greenlet_spawn(functools.partial(decide, *args, **more))
                except OperationalError as error:
                    if not is_busy(error):
                        raise
                    if timeout.gave_up or loop.time() >= deadline:
                        timeout.gave_up = True
                        raise
                finally:
                    timeout.at_once = False
            await asyncio.sleep(TRY_SECONDS)

    @asynccontextmanager
    async def none(self) -> AsyncIterator[None]:
        """Nothing is being decided within, and nothing will be: for the end."""
        async with self._lock:
            yield

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._lock.acquire()
        except TimeoutError:
            detail = (
                f"The database did not take earlier changes within {TURN_SECONDS:g} s: nothing was changed, try again."
            )
            raise ProblemError(503, "store-busy", detail) from None
        try:
            yield
        finally:
            self._lock.release()
