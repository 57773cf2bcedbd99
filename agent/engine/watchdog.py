"""Finds ops that have been running for too long: their lanes are stuck."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

STOP_SECONDS: Final = 2.0
"""Time between two calls of `Watchdog.stuck_seconds` from which the process counts as stopped in between. A thread that
waits for ops calls it every 0.1 s or more often."""


class Watchdog:
    """Measures for how long ops have been running while one thread waits for them. Make one for each wait.

    Time in which the whole process was stopped does not count: by a signal (Ctrl-Z, SIGSTOP of a batch system), a
    debugger, or a container that is paused. Otherwise an op that was running at that time would count as stuck when
    the process continues.

    limit_seconds: longest time of an op.
    clock: seconds on the clock of the ops.
    """

    def __init__(self, limit_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_seconds, self._clock = limit_seconds, clock
        self._began = self._called = clock()
        self._stops: list[tuple[float, float]] = []
        """Times in which the process was stopped: start and end."""

    def stuck_seconds(self, since: float) -> float | None:
        """Seconds for which an op has been running if that is more than the limit, else None. `since`: when it began.

        A stop before this wait is not known. So an op also gets STOP_SECONDS (or the limit, if that is less) of this
        wait.
        """
        before, self._called = self._called, self._clock()
        if self._called - before > STOP_SECONDS:
            self._stops.append((before, self._called))
        waited = self._seconds_since(self._began)
        running = self._seconds_since(since)
        is_too_long = running > self._limit_seconds and waited >= min(self._limit_seconds, STOP_SECONDS)
        return running if is_too_long else None

    def _seconds_since(self, moment: float) -> float:
        """Seconds from `moment` to the last call, without the time in which the process was stopped."""
        stopped = sum(max(0.0, end - max(start, moment)) for start, end in self._stops)
        return self._called - moment - stopped
