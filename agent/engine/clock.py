"""Time and waiting of the executor's lane threads: the real clock, and a virtual one that tests use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Clock and condition variable of the executor. All waiting of its threads goes through it."""

    @property
    def lock(self) -> threading.Condition: ...

    def now(self) -> float:
        """The present time, in seconds."""

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits, with `lock` held, until `predicate()` is true; False when `timeout` seconds passed first."""

    def notify(self) -> None:
        """To be called, with `lock` held, when the predicates of waiting threads may have become true."""


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


class VirtualClock:
    """Simulated time: it stands still while a participant computes, and jumps to the earliest end of a `sleep` when all
    of them wait or sleep.

    `participants`: the number of threads that take part (lanes, and the thread that drives them). Deterministic as long
    as each of these threads is always either computing, sleeping or waiting here.
    """

    def __init__(self, participants: int) -> None:
        self.lock = threading.Condition()
        self._time = 0.0
        self._running = participants
        self._waiting: set[int] = set()
        self._sleeping: dict[int, float] = {}

    def now(self) -> float:
        return self._time

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        me = threading.get_ident()
        while not predicate():
            self._waiting.add(me)
            self._running -= 1
            self._advance()
            self.lock.wait_for(lambda: me not in self._waiting)
        return True

    def sleep(self, seconds: float) -> None:
        """Blocks the calling thread for so much simulated time."""
        with self.lock:
            me = threading.get_ident()
            self._sleeping[me] = self._time + seconds
            self._running -= 1
            self._advance()
            self.lock.wait_for(lambda: me not in self._sleeping)

    def notify(self) -> None:
        self._running += len(self._waiting)
        self._waiting.clear()
        self.lock.notify_all()

    def leave(self) -> None:
        """The calling thread takes part no longer: time does not wait for it."""
        with self.lock:
            self._running -= 1
            self._advance()

    def _advance(self) -> None:
        if self._running or not self._sleeping:
            return
        self._time = min(self._sleeping.values())
        due = [thread for thread, wake in self._sleeping.items() if wake <= self._time]
        for thread in due:
            del self._sleeping[thread]
        self._running += len(due)
        self.lock.notify_all()
