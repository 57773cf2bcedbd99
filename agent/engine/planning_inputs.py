"""Smoothed inputs of the planner: the time from the start of a plan to `step()`, and the speeds of storage paths."""

from __future__ import annotations

from collections.abc import Mapping
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
