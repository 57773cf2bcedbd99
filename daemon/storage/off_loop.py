"""Methods that wait for the disk, called from synchronous code on the event loop without stopping the loop.

SQLAlchemy's own bridge to asyncio: code that `greenlet_spawn` runs is suspended at such a call, and goes on when a
thread has done it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy.util.concurrency import await_only, in_greenlet


class HasThread(Protocol):
    @property
    def thread(self) -> Executor: ...


S = TypeVar("S", bound=HasThread)
P = ParamSpec("P")
T = TypeVar("T")


def off_loop(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """The method: done by the object's thread within a turn (`control/turns.py`), elsewhere where it is called."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **more: P.kwargs) -> T:
        if not in_greenlet():
            return method(self, *args, **more)
        work = functools.partial(method, self, *args, **more)
        return await_only(asyncio.get_running_loop().run_in_executor(self.thread, work))

    return call
