"""Estimated run times of ops on storage paths, which the planner uses to order ops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from tidegate.plan.ops import Op
from tidegate.plan.schedule import TypicalOpTimes
from tidegate.plan.tier_split import PathSpeeds

SHORTEST_SECONDS: Final = 1e-3
"""If `step()` is called less than so many seconds after the start of its plan, the planner counts this time as 0. It is
so short if `step()` itself made the plan: then no op could run before the call."""


def rounded_step_delay(seconds: float) -> float:
    """Rounds `seconds`, the time from the start of a plan to the call of `step()`, down to a power of two; 0 if it is
    shorter than SHORTEST_SECONDS.

    Plans depend on this time. Rounding leaves few different values, and so few different plans.
    """
    return 2.0 ** math.floor(math.log2(seconds)) if seconds >= SHORTEST_SECONDS else 0.0


class PathOpTimes(TypicalOpTimes):
    """Estimates op times to order ops: typical times for copies and updates, measured speeds for storage paths.

    During a step a path is read and written at the same time. A read needs a free host slot (a staging buffer), and a
    slot is free again when its state has been written. So both directions advance equally fast: at the speed of the
    slower one, or more slowly if they share the device. The measured speed of the faster direction, with pauses in
    between, is a burst from a cache or from throttling credit, and would not last.
    """

    def __init__(self, speeds: Mapping[str, PathSpeeds]) -> None:
        self._speeds = speeds

    def seconds(self, op: Op, /) -> float:
        if op.path is None or op.path not in self._speeds:
            return super().seconds(op)
        return op.nbytes * self._speeds[op.path].seconds_per_byte
