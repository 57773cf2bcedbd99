"""What planning counts on: how long after the start of a plan its step comes, and how fast paths are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tidegate.plan.path_times import rounded
from tidegate.plan.tier_split import PathSpeeds

OTHER: Final = 1.25
"""A path that takes so many times as long for a subgroup, or as much less, has another speed."""


class Pace:
    """Rounded down to a power of two, and the same as long as it is true and not much too little: each new value is
    another plan."""

    def __init__(self) -> None:
        self.step_at = 0.0
        """Seconds from the start of a plan to its step, or less."""

    def observe(self, seconds: float) -> None:
        """A step came so many seconds after its plan began."""
        if not self.step_at <= seconds < 4 * self.step_at:
            self.step_at = rounded(seconds)


class PathPace:
    """The same speeds until a path's live one is clearly another: that changes a little with each step, and each new
    value is another plan."""

    def __init__(self) -> None:
        self.speeds: dict[str, PathSpeeds] = {}

    def observe(self, live: Mapping[str, PathSpeeds]) -> None:
        """These are the speeds now. Plans go by `PathSpeeds.seconds_per_byte` alone."""
        for path, now in live.items():
            known = self.speeds.get(path)
            if known is None or not 1 / OTHER < now.seconds_per_byte / known.seconds_per_byte < OTHER:
                self.speeds[path] = now
