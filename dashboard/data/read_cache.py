"""Cache of values read from the daemon, shared by all viewers; old values are used while the daemon is unreachable."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from cachetools import LRUCache

from tidegate.client.daemon_client import DaemonClient
from tidegate.dashboard.data import clients
from tidegate.errors import DaemonError
from tidegate.wire.alert import AlertView

T = TypeVar("T")
NO_RUN: Final = ""
MAX_KEPT: Final = 64
"""Largest number of entries in a cache; the least recently used entry is dropped."""


@dataclass(frozen=True, kw_only=True)
class Reading(Generic[T]):
    """The newest available value. `problem`: why it is not up to date, as a sentence."""

    value: T | None = None
    problem: str | None = None


@dataclass(slots=True)
class _Entry(Generic[T]):
    """One entry of a cache. Its lock is held while the value is read from the daemon, so that concurrent callers share
    one read."""

    reading: Reading[T] = field(default_factory=Reading)
    until: float = 0.0
    """Time at which the value expires, on the monotonic clock."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class CachedQuery(Generic[T]):
    """A cached query: reads a value at most every `seconds` for each daemon and key. Thread-safe.

    All callers get the same object, so they must not change it.
    """

    def __init__(self, read: Callable[[DaemonClient, Any], T], seconds: float, most: int = MAX_KEPT) -> None:
        self._read, self._seconds = read, seconds
        self._lock = threading.Lock()
        self._entries: LRUCache[Hashable, _Entry[T]] = LRUCache(most)

    def get(self, url: str, key: Hashable = None) -> Reading[T]:
        """The value, read again if it is older than `seconds`; the last value with the problem if the read fails."""
        with self._lock:
            entry = self._entries.setdefault((url, key), _Entry())
        if time.monotonic() < entry.until:
            return entry.reading
        with entry.lock:
            if time.monotonic() >= entry.until:
                entry.reading = self._fresh(url, key, entry.reading)
                entry.until = time.monotonic() + self._seconds
            return entry.reading

    def last(self, url: str, key: Hashable = None) -> T | None:
        """The value that was read last, of any age, without a request."""
        with self._lock:
            entry = self._entries.get((url, key))
        return entry.reading.value if entry else None

    def _fresh(self, url: str, key: Hashable, before: Reading[T]) -> Reading[T]:
        try:
            return Reading(value=self._read(clients.shared_client(url), key))
        except DaemonError as error:
            return Reading(value=before.value, problem=clients.explain(error, url))


def _read_firing(client: DaemonClient, _: object) -> Mapping[str, Sequence[AlertView]]:
    by_run = defaultdict[str, list[AlertView]](list)
    for alert in client.firing():
        by_run[alert.run].append(alert)
    return dict(by_run)


ADVICE: Final = CachedQuery(lambda client, key: client.advice(key[0]), 20.0)
"""Cached knob advice of the model, by run and generation. It is kept for 20 s, because computing it costs the daemon
processor time."""
AUDIT: Final = CachedQuery(lambda client, key: client.audit(key[0], key[1]), 2.0)
"""Cached rows of the audit log, by run and number of rows."""
ALERTS: Final = CachedQuery(lambda client, run: client.alerts(run or None), 5.0)
"""Cached alerts by run name. The name `NO_RUN` selects the alerts that concern no run in particular."""
FIRING: Final = CachedQuery(_read_firing, 5.0)
"""Cached firing alerts by run name; those that concern no run in particular have the name `NO_RUN`."""
