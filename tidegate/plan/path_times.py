"""Estimated run times of ops on storage paths, which the planner uses to order ops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from tidegate.plan.ops import Op
from tidegate.plan.schedule import TypicalOpTimes
from tidegate.plan.tier_split import PathSpeeds

SHORTEST_SECONDS: Final = 1e-3
"""Shortest delay from the start of a plan to its step that counts, in seconds; shorter delays count as 0. A delay is
so short if `step()` itself made the plan: then no op could run before `step()`."""


def rounded_step_delay(seconds: float) -> float:
    """Seconds from the start of a plan to its step, rounded down to a power of two.

    Rounding keeps the number of different plans small: each value gives another plan.
    """
    return 2.0 ** math.floor(math.log2(seconds)) if seconds >= SHORTEST_SECONDS else 0.0


class PathOpTimes(TypicalOpTimes):
    """Estimates op times to order ops: typical times for copies and updates, measured speeds for storage paths.

    During a step a path is read and written at the same time, and its host slots couple both directions: no more can be
    read than has been written. So both directions advance at the speed of the slower direction. The measured speed of
    the faster direction, with pauses in between, is a burst from a cache or from throttling credit and would not last.
    """

    def __init__(self, speeds: Mapping[str, PathSpeeds]) -> None:
        self._speeds = speeds

    def seconds(self, op: Op, /) -> float:
        if op.path is None or op.path not in self._speeds:
            return super().seconds(op)
        return op.nbytes * self._speeds[op.path].seconds_per_byte
