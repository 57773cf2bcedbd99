"""Clocks with which the executor's lane threads measure time and wait: the real clock, and a simulated one for
tests."""

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


class VirtualClock:
    """Simulated clock for tests. Time stands still while a participating thread computes. When all participating
    threads wait or sleep, time jumps to the earliest end of a `sleep`.

    `participants`: the number of participating threads (lanes, and the thread that drives them). The simulation is
    deterministic if each of these threads is always computing, sleeping or waiting with this clock.
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
        """Blocks the calling thread until `seconds` of simulated time have passed."""
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
        """Removes the calling thread from the participants: simulated time then advances without waiting for this
        thread."""
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
