"""What was moved to and from one storage path, and counting it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

from tidegate.agent.devices.base import DoneEvent

Operation = Literal["read", "write"]

MAX_MOVES: Final = 10_000
"""Moves that are kept for telemetry until it takes them: nobody may listen."""


def nothing() -> None:
    """What is called when nobody wants to be told."""


@dataclass(frozen=True, slots=True)
class Transfer(DoneEvent):
    """One file read or written. `nbytes` is 0 where nothing had to be moved; the wait for the lock is not in its
    span."""

    nbytes: int
    lock_wait_seconds: float
    is_whole: bool = True
    """False for a piece of one: a checkpoint is drained in pieces."""


@dataclass
class PathCounters:
    """What happened on a path since the run began, by operation: `read`, `write`. Calibration does not count."""

    retries: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0})
    errors: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0})
    """Attempts that failed, those that were repeated included."""
    bytes: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0})
    """As they were moved, padding included."""
    lock_wait_seconds: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "write": 0.0})
    moves: deque[tuple[str, Transfer]] = field(default_factory=lambda: deque(maxlen=MAX_MOVES))
    """The newest, with their operation; who wants to know takes them out."""
    taken_over_bytes: int = 0
    """Written here because the path that the plan named had failed; in timelines these bytes and seconds are in the
    lane of that path."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Lanes may read and write in two threads each, and a checkpoint that is drained beside them."""
    under_way: dict[object, tuple[str, float]] = field(default_factory=dict)
    """Operation and begin, on the monotonic clock, of each transfer that has not ended."""

    @contextmanager
    def going_on(self, operation: str) -> Iterator[None]:
        """For the duration of one attempt, the wait for the lock excluded."""
        transfer = object()
        self.under_way[transfer] = (operation, time.monotonic())
        try:
            yield
        finally:
            del self.under_way[transfer]

    def count(self, operation: str, moved: Transfer) -> Transfer:
        with self._lock:
            self.bytes[operation] += moved.nbytes
            self.lock_wait_seconds[operation] += moved.lock_wait_seconds
            self.moves.append((operation, moved))
        return moved

    def count_retry(self, operation: str) -> None:
        with self._lock:
            self.retries[operation] += 1

    def count_error(self, operation: str) -> None:
        with self._lock:
            self.errors[operation] += 1

    def count_taken_over(self, nbytes: int) -> None:
        with self._lock:
            self.taken_over_bytes += nbytes
