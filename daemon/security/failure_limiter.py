"""Rate limit for failed requests: a token bucket for each token and each address, in bounded memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cachetools import LRUCache

REFILL_SECONDS: Final = 3.0
"""Time in seconds in which the number of allowed failures in a token bucket grows by one, up to its maximum."""
MAX_KEYS: Final = 10_000
"""Maximum number of buckets in memory; above it, the least recently used bucket is deleted."""


@dataclass(slots=True)
class _Bucket:
    left: float
    """Allowed failures that are left."""
    at: float
    """Time at which `left` was computed, in seconds of the clock."""


class FailureLimiter:
    """Counts failed requests in one token bucket of allowed failures for each key. A key is a text that names an access
    token (by its digest) or a client's address.

    Only failures count, so a client with a valid token is never delayed by other clients that share its address.
    """

    def __init__(self, allowed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._allowed = allowed
        self._clock = clock
        self._buckets: LRUCache[str, _Bucket] = LRUCache(MAX_KEYS)

    def count(self, *keys: str) -> int:
        """Counts one failure of every key. Returns the seconds to wait if a key has failed too often, else 0."""
        return max(self._take(key) for key in keys)

    def _take(self, key: str) -> int:
        now = self._clock()
        bucket = self._buckets.setdefault(key, _Bucket(self._allowed, now))
        bucket.left = min(self._allowed, bucket.left + (now - bucket.at) / REFILL_SECONDS)
        bucket.at = now
        if bucket.left < 1:
            return math.ceil((1 - bucket.left) * REFILL_SECONDS)
        bucket.left -= 1
        return 0
