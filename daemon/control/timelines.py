"""Timelines of one rank: the newest timeline and a few older ones, so that an operator can look at earlier steps."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from cachetools import FIFOCache

from tidegate.wire.timeline import TimelineView

TIMELINES_KEPT: Final = 24
"""Number of kept timelines. A compressed timeline is about 10 kB for 200 spans, and at most 100 kB."""
KEEP_SECONDS: Final = 5.0
"""Minimum time between two kept timelines, in seconds. Without a minimum, the kept timelines of a run with short steps
would cover only a few seconds, and their compression would cost more than the rest of a report."""


@dataclass
class Timelines:
    """The kept timelines of one rank, oldest first. Not thread-safe."""

    clock: Callable[[], float] = monotonic
    newest: TimelineView | None = None
    _kept: FIFOCache[int, bytes] = field(default_factory=lambda: FIFOCache(TIMELINES_KEPT))
    _kept_at: float = float("-inf")

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the steps that have a timeline, the oldest timeline first. A training that resumes from a
        checkpoint runs the same step numbers again, so a number may be smaller than the one before it."""
        newest = () if self.newest is None or self.newest.step in self._kept else (self.newest.step,)
        return (*self._kept, *newest)

    def add(self, view: TimelineView) -> None:
        """Stores `view` as the newest timeline. Also keeps it for later, unless the last kept timeline was added less
        than `KEEP_SECONDS` ago."""
        self.newest = view
        now = self.clock()
        if now - self._kept_at < KEEP_SECONDS:
            return
        self._kept_at = now
        self._kept.pop(view.step, None)
        self._kept[view.step] = zlib.compress(view.model_dump_json().encode(), level=1)

    def at(self, step: int) -> TimelineView | None:
        """The timeline of a step; None if it is not kept."""
        if self.newest is not None and self.newest.step == step:
            return self.newest
        packed = self._kept.get(step)
        return None if packed is None else TimelineView.model_validate_json(zlib.decompress(packed))

    def forget(self) -> None:
        self.newest = None
        self._kept.clear()
