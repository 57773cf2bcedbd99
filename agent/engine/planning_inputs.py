"""Smoothed inputs of the planner: the time from the start of a plan to `step()`, the time for which storage paths are
idle after it, and their speeds."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Final

from tidegate.plan.path_times import rounded_step_delay
from tidegate.plan.tier_split import PathSpeeds

SPEED_CHANGE_FACTOR: Final = 1.25
"""The speed of a path counts as changed when its time per byte has grown or shrunk by this factor."""


class StepDelay:
    """Lower estimate of the time from the start of a plan to `step()`.

    The estimate is a measured time, rounded down to a power of two. It is replaced only when a measured time is shorter
    than the estimate, or at least four times as long, because each new estimate needs a new plan.
    """

    def __init__(self) -> None:
        self.step_at = 0.0
        """Estimated seconds from the start of a plan to `step()`; 0 before the first step."""

    def observe(self, seconds: float) -> None:
        """Updates the estimate: `step()` was called `seconds` after the start of its plan."""
        if not self.step_at <= seconds < 4 * self.step_at:
            self.step_at = rounded_step_delay(seconds)


class IdleTime:
    """Estimate of the time from the end of `step()` to the next gradient, in which storage paths are idle.

    The estimate is the median of the last steps, rounded down to a power of the eighth root of two. It is replaced only
    when the median is smaller, or clearly larger, because each new estimate needs a new plan.
    """

    STEPS: Final = 5
    """Number of steps in the median. There is no estimate before so many steps."""
    LEAST_SECONDS: Final = 0.002
    """Shorter times count as none."""
    GROWTH: Final = 1.25
    """The estimate is replaced when the median is so many times as large."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """The estimate in seconds."""
        self._measured: deque[float] = deque(maxlen=self.STEPS)
        self._since: float | None = None

    def began(self) -> None:
        """To be called at the end of a step, when only deferred flushes are left."""
        self._since = time.monotonic()

    def ended(self) -> None:
        """To be called when the next gradient has arrived, or the next plan begins. Only the first call after `began`
        has an effect."""
        if self._since is not None:
            self.observe(time.monotonic() - self._since)
            self._since = None

    def forget(self) -> None:
        """To be called when something else waits for the deferred flushes, as a checkpoint does: this step shows
        nothing."""
        self._since = None

    def observe(self, seconds: float) -> None:
        """Updates the estimate: the paths were idle for `seconds`."""
        self._measured.append(seconds)
        if len(self._measured) < self.STEPS:
            return
        typical = median(self._measured)
        if typical < self.LEAST_SECONDS:
            self.seconds = 0.0
        elif not self.seconds <= typical < self.GROWTH * self.seconds:
            self.seconds = 2.0 ** (math.floor(8 * math.log2(typical)) / 8)


class StablePathSpeeds:
    """Speeds of paths for the planner. A speed is replaced by the live speed only when the live speed differs clearly
    (see `SPEED_CHANGE_FACTOR`).

    Live speeds change a little with each step, and each new value needs a new plan.
    """

    def __init__(self) -> None:
        self.speeds: dict[str, PathSpeeds] = {}

    def observe(self, live: Mapping[str, PathSpeeds]) -> None:
        """Updates the speeds from the live speeds by path. Only `PathSpeeds.seconds_per_byte` is compared, because
        plans use nothing else."""
        for path, now in live.items():
            known = self.speeds.get(path)
            if (
                known is None
                or not 1 / SPEED_CHANGE_FACTOR < now.seconds_per_byte / known.seconds_per_byte < SPEED_CHANGE_FACTOR
            ):
                self.speeds[path] = now
