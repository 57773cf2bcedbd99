"""The live view's caches in this process: tests expire and clear them."""

from __future__ import annotations

from typing import Any

from tidegate.dashboard.data import clients, queries, read_cache
from tidegate.dashboard.data.read_cache import CachedQuery


def expire(*caches: CachedQuery[Any]) -> None:
    """Marks all values of these caches (default: of all) as expired: each is read again at its next use."""
    for cache in caches or _all():
        for entry in cache._entries.values():
            entry.until = 0.0


def forget() -> None:
    """Clears all caches and closes the clients."""
    for cache in _all():
        cache._entries.clear()
    queries._timelines.clear()
    for client in clients._client.cache.values():
        client.close()
    clients._client.cache.clear()


def _all() -> tuple[CachedQuery[Any], ...]:
    found = (*vars(read_cache).values(), *vars(queries).values())
    return tuple(value for value in found if isinstance(value, CachedQuery))
