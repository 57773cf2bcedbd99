"""How often one may fail: failures of each token and each address are counted, in bounded memory."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

REFILL_SECONDS: Final = 3.0
"""When all are used up, one more is forgiven in so many seconds."""
KEPT: Final = 10_000


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


class Failures:
    """A bucket of forgiven failures for each key: a token's digest, an address.

    Only failures count: whoever shows a good token is never held up by others that share the address.
    """

    def __init__(self, forgiven: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._forgiven = forgiven
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def note(self, *keys: str) -> int:
        """Counts one failure of every key. Seconds to wait when one has failed too often, else 0."""
        return max(self._take(key) for key in keys)

    def _take(self, key: str) -> int:
        now = self._clock()
        bucket = self._buckets.setdefault(key, _Bucket(self._forgiven, now))
        self._buckets.move_to_end(key)
        while len(self._buckets) > KEPT:
            self._buckets.popitem(last=False)
        bucket.left = min(self._forgiven, bucket.left + (now - bucket.at) / REFILL_SECONDS)
        bucket.at = now
        if bucket.left < 1:
            return math.ceil((1 - bucket.left) * REFILL_SECONDS)
        bucket.left -= 1
        return 0
