"""What each phase of the next step should take: the update by the simulator, the others as they have been."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Final

STEADY_PHASES: Final = ("forward", "backward")
"""Knobs do not change them."""
TYPICAL_STEPS: Final = 20


class Expected:
    """Medians of the last TYPICAL_STEPS steps of each phase that knobs do not change."""

    def __init__(self) -> None:
        self._measured: dict[str, deque[float]] = {phase: deque(maxlen=TYPICAL_STEPS) for phase in STEADY_PHASES}

    def observe(self, phase_seconds: Mapping[str, float]) -> None:
        for phase, measured in self._measured.items():
            if phase in phase_seconds:
                measured.append(phase_seconds[phase])

    def with_update(self, seconds: float | None) -> dict[str, float]:
        """By phase; what nobody can tell yet is left out."""
        found = {phase: median(measured) for phase, measured in self._measured.items() if measured}
        return found if seconds is None else {**found, "update": seconds}
