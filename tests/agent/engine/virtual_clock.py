"""A simulated clock for the executor."""

from __future__ import annotations

import threading
from collections.abc import Callable


class VirtualClock:
    """Simulated clock. Time stands still while a participating thread computes. When all participating
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
