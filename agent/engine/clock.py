"""The clock of the executor: where lane threads wait. Real here; a virtual one drives the null device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """One lock, one time. All waiting of the executor goes through it."""

    @property
    def lock(self) -> threading.Condition: ...

    def now(self) -> float:
        """Seconds."""

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """With `lock` held: waits until the predicate holds; False when `timeout` seconds passed first."""

    def notify(self) -> None:
        """With `lock` held: predicates may have changed."""


class MonotonicClock:
    """The host's monotonic clock. Whoever notifies asks what the others wait for, and wakes only those that have it:
    waking all lanes after every op costs more than most ops."""

    def __init__(self, mutex: threading.Lock | threading.RLock | None = None) -> None:
        """`mutex`: what all conditions share; one of its own when None."""
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
    """Time that passes only while every participant waits: then it jumps to the earliest sleeper.

    `participants` threads take part (lanes and the one that drives them). Deterministic as long as each of them is
    always either computing, sleeping or waiting here.
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
        """The calling thread takes part no longer."""
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
