"""What is read from the daemon now and then: shared for a while among viewers, and kept when the daemon is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from tidegate.client import DaemonClient
from tidegate.dashboard import feed
from tidegate.errors import DaemonError

T = TypeVar("T")
MAX_KEPT: Final = 64
"""Of a kind; the one read longest ago goes first."""
RUNS_KEPT: Final = 4096
"""Of what is asked of every run."""


@dataclass(frozen=True, kw_only=True)
class Reading(Generic[T]):
    """The newest value that could be had. `problem`: why it is not of this moment; `error` is what it came of."""

    value: T | None = None
    problem: str | None = None
    error: DaemonError | None = None
    read_at: float = 0.0


class Kept(Generic[T]):
    """One kind of thing, asked for at most every `seconds` for each daemon and key."""

    def __init__(self, read: Callable[[DaemonClient, Any], T], seconds: float, most: int = MAX_KEPT) -> None:
        self._read, self._seconds, self._most = read, seconds, most
        self._lock = threading.Lock()
        self._found: dict[Hashable, tuple[float, Reading[T]]] = {}

    def get(self, url: str, key: Hashable) -> Reading[T]:
        """The value as it was within the last `seconds`, else read anew; the last one with the problem if it cannot."""
        with self._lock:
            until, kept = self._found.get((url, key), (0.0, Reading()))
        if time.monotonic() < until:
            return kept
        try:
            reading = Reading(value=self._read(feed.reader(url), key), read_at=time.time())
        except DaemonError as error:
            why = feed.explain(error, url)
            reading = Reading(value=kept.value, problem=why, error=error, read_at=kept.read_at)
        with self._lock:
            self._found.pop((url, key), None)
            self._found[url, key] = (time.monotonic() + self._seconds, reading)
            while len(self._found) > self._most:
                del self._found[next(iter(self._found))]
        return reading

    def forget(self) -> None:
        with self._lock:
            self._found.clear()


ADVICE: Final = Kept(lambda client, key: client.advice(key[0]), 20.0)
"""By run and generation: making one keeps the daemon busy for a moment."""
AUDIT: Final = Kept(lambda client, key: client.audit(key[0], key[1]), 2.0)
"""By run and the most rows to read."""
ALERTS: Final = Kept(lambda client, run: client.alerts(run or None), 5.0, RUNS_KEPT)
"""By run; those without a run under the empty name."""


def forget() -> None:
    """Drops everything that is kept."""
    for kept in (ADVICE, AUDIT, ALERTS):
        kept.forget()
