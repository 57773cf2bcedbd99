"""The clock with which the executor's lane threads measure time and wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol


class ExecutorClock(Protocol):
    """Interface: clock and condition variable of the executor. All threads of the executor wait with `wait_for`."""

    @property
    def lock(self) -> threading.Condition: ...

    def now(self) -> float:
        """The present time, in seconds."""

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until `predicate()` is true and returns True; returns False if `timeout` seconds pass before. The
        caller must hold `lock`."""

    def notify(self) -> None:
        """Wakes the threads in `wait_for` whose predicate is true now. To be called, with `lock` held, after each
        change that may make a predicate true."""


class MonotonicClock:
    """The host's monotonic clock. `notify` evaluates the predicates of the waiting threads, and wakes only the threads
    whose predicate is true: waking all lanes after every op costs more than most ops."""

    def __init__(self, mutex: threading.Lock | threading.RLock | None = None) -> None:
        """`mutex`: the lock that all conditions of this clock share; a new one when None."""
        self._mutex = mutex or threading.RLock()
        self.lock = threading.Condition(self._mutex)
        self._waiting: dict[threading.Condition, Callable[[], bool]] = {}

    def now(self) -> float:
        return time.monotonic()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        mine = threading.Condition(self._mutex)
        self._waiting[mine] = predicate
        try:
            return mine.wait_for(predicate, timeout)
        finally:
            del self._waiting[mine]

    def notify(self) -> None:
        for waiter, predicate in tuple(self._waiting.items()):
            if predicate():
                waiter.notify()
