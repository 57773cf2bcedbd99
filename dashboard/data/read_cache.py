"""What is read from the daemon: shared for a while among viewers, and kept when the daemon is away."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from tidegate.client.daemon_client import DaemonClient
from tidegate.dashboard.data import clients
from tidegate.errors import DaemonError

T = TypeVar("T")
MAX_KEPT: Final = 64
"""Of a kind; the one asked for longest ago goes first."""


@dataclass(frozen=True, kw_only=True)
class Reading(Generic[T]):
    """The newest value that could be had. `problem`: why it is not of this moment; `error` is what it came of."""

    value: T | None = None
    problem: str | None = None
    error: DaemonError | None = None
    read_at: float = 0.0


@dataclass(slots=True)
class _Entry(Generic[T]):
    """One thing. Who reads it holds its lock: others who want it meanwhile get what that one brings."""

    reading: Reading[T] = field(default_factory=Reading)
    until: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Kept(Generic[T]):
    """One kind of thing, asked for at most every `seconds` for each daemon and key. For any thread.

    Everybody gets the same object: what is read is never changed.
    """

    def __init__(self, read: Callable[[DaemonClient, Any], T], seconds: float, most: int = MAX_KEPT) -> None:
        self._read, self._seconds, self._most = read, seconds, most
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry[T]] = OrderedDict()
        _KINDS.append(self)

    def get(self, url: str, key: Hashable = None) -> Reading[T]:
        """The value as it was within the last `seconds`, else read anew; the last one with the problem if it cannot."""
        entry = self._entry((url, key))
        if time.monotonic() < entry.until:
            return entry.reading
        with entry.lock:
            if time.monotonic() >= entry.until:
                entry.reading = self._fresh(url, key, entry.reading)
                entry.until = time.monotonic() + self._seconds
            return entry.reading

    def last(self, url: str, key: Hashable = None) -> T | None:
        """The value that was read last, however old; asks nobody."""
        with self._lock:
            found = self._entries.get((url, key))
        return found.reading.value if found else None

    def expire(self) -> None:
        """All of it is read anew when it is wanted next; kept where that cannot be."""
        with self._lock:
            for entry in self._entries.values():
                entry.until = 0.0

    def forget(self) -> None:
        with self._lock:
            self._entries.clear()

    def _entry(self, where: Hashable) -> _Entry[T]:
        with self._lock:
            entry = self._entries.setdefault(where, _Entry())
            self._entries.move_to_end(where)
            while len(self._entries) > self._most:
                self._entries.popitem(last=False)
        return entry

    def _fresh(self, url: str, key: Hashable, before: Reading[T]) -> Reading[T]:
        try:
            return Reading(value=self._read(clients.reader(url), key), read_at=time.time())
        except DaemonError as error:
            return Reading(value=before.value, problem=clients.explain(error, url), error=error, read_at=before.read_at)


_KINDS: list[Kept[Any]] = []

ADVICE: Final = Kept(lambda client, key: client.advice(key[0]), 20.0)
"""By run and generation: making one keeps the daemon busy for a moment."""
AUDIT: Final = Kept(lambda client, key: client.audit(key[0], key[1]), 2.0)
"""By run and the most rows to read."""
ALERTS: Final = Kept(lambda client, run: client.alerts(run or None), 5.0)
"""By run; those without a run under the empty name."""
FIRING: Final = Kept(lambda client, _: client.firing(), 5.0)
"""In all runs and in none."""


def expire() -> None:
    """Everything is read anew when it is wanted next."""
    for kind in _KINDS:
        kind.expire()


def forget() -> None:
    """Drops everything that is kept, and closes the clients."""
    for kind in _KINDS:
        kind.forget()
    clients.forget()
