"""The timelines of one rank: the newest, and a few of before, so that an operator can look back at a step."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from tidegate.wire.timeline import TimelineView

KEPT: Final = 24
"""Compressed, about 10 kB each for 200 spans, at most 100 kB for those that fill a message."""
KEEP_SECONDS: Final = 5.0
"""One in so many seconds is kept: of a run with short steps they would else be those of a few seconds, and compressing
each would cost more than all the rest that a report costs."""


@dataclass
class Timelines:
    """Newest last. Not for several threads."""

    clock: Callable[[], float] = monotonic
    newest: TimelineView | None = None
    _kept: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    _kept_at: float = float("-inf")

    @property
    def steps(self) -> tuple[int, ...]:
        """Of which there is a timeline, oldest first. Training that went back to a checkpoint repeats its steps."""
        newest = () if self.newest is None or self.newest.step in self._kept else (self.newest.step,)
        return (*self._kept, *newest)

    def take(self, view: TimelineView) -> None:
        self.newest = view
        now = self.clock()
        if now - self._kept_at < KEEP_SECONDS:
            return
        self._kept_at = now
        self._kept.pop(view.step, None)
        self._kept[view.step] = zlib.compress(view.model_dump_json().encode(), level=1)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def at(self, step: int) -> TimelineView | None:
        if self.newest is not None and self.newest.step == step:
            return self.newest
        packed = self._kept.get(step)
        return None if packed is None else TimelineView.model_validate_json(zlib.decompress(packed))

    def forget(self) -> None:
        self.newest = None
        self._kept.clear()
