"""How long after the start of a plan its step comes: what planning may count on."""

from __future__ import annotations

import math

SHORTEST_SECONDS = 1e-3
"""What is less is nothing: `step()` made the plan itself."""


class Pace:
    """Rounded down to a power of two, and the same as long as it is true and not much too little: each new value is
    another plan."""

    def __init__(self) -> None:
        self.step_at = 0.0
        """Seconds from the start of a plan to its step, or less."""

    def observe(self, seconds: float) -> None:
        """A step came so many seconds after its plan began."""
        if not self.step_at <= seconds < 4 * self.step_at:
            self.step_at = 2.0 ** math.floor(math.log2(seconds)) if seconds >= SHORTEST_SECONDS else 0.0
