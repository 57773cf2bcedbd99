"""Decorator for store methods that wait for the disk: synchronous code can call them without blocking the event loop.

It uses SQLAlchemy's bridge to asyncio: code that `greenlet_spawn` runs is suspended at such a call, and continues when
a thread has done the work.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy.util.concurrency import await_only, in_greenlet


class HasThread(Protocol):
    """An object with a thread that runs its decorated methods."""

    @property
    def thread(self) -> Executor: ...


S = TypeVar("S", bound=HasThread)
P = ParamSpec("P")
T = TypeVar("T")


def off_loop(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorator: a call inside a turn (`control/turns.py`) runs `method` in the object's thread; other calls run it
    directly."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **more: P.kwargs) -> T:
        if not in_greenlet():
            return method(self, *args, **more)
        work = functools.partial(method, self, *args, **more)
        return await_only(asyncio.get_running_loop().run_in_executor(self.thread, work))

    return call
