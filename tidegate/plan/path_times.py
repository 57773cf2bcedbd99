"""How long ops on storage paths take, as far as a planner cares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from tidegate.plan.ops import Op
from tidegate.plan.schedule import TypicalClock
from tidegate.plan.tier_split import PathSpeeds

SHORTEST_SECONDS: Final = 1e-3
"""What is less is nothing: `step()` made the plan itself."""


def rounded(seconds: float) -> float:
    """Seconds from the start of a plan to its step, rounded down to a power of two: each value is another plan."""
    return 2.0 ** math.floor(math.log2(seconds)) if seconds >= SHORTEST_SECONDS else 0.0


class PathClock(TypicalClock):
    """Typical times of copies and updates, and of paths those that were measured: to order ops, nothing else.

    While a step is under way a path is read and written at once, and its host slots tie both together: no more is
    read than has been written. So both ways go at the pace of one subgroup after the other, whichever is the slower.
    What was measured of the faster one, with rests in between, comes from credit or a cache and would not last.
    """

    def __init__(self, speeds: Mapping[str, PathSpeeds]) -> None:
        self._speeds = speeds

    def seconds(self, op: Op, /) -> float:
        if op.path is None or op.path not in self._speeds:
            return super().seconds(op)
        return op.nbytes * self._speeds[op.path].seconds_per_byte
