"""Forecast of the duration of each phase of the next step: the update from the simulator, the other phases as medians
of past steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Final

STEADY_PHASES: Final = ("forward", "backward")
"""Phases whose duration does not depend on knobs."""
TYPICAL_STEPS: Final = 20
"""Number of past steps in a median."""


class PhaseForecast:
    """Forecast of the durations of the phases that do not depend on knobs: medians over the last TYPICAL_STEPS
    steps."""

    def __init__(self) -> None:
        self._measured: dict[str, deque[float]] = {phase: deque(maxlen=TYPICAL_STEPS) for phase in STEADY_PHASES}

    def observe(self, phase_seconds: Mapping[str, float]) -> None:
        """Adds the measured phases of a step, in seconds."""
        for phase, measured in self._measured.items():
            if phase in phase_seconds:
                measured.append(phase_seconds[phase])

    def seconds(self, phase: str) -> float:
        """Forecast of one of STEADY_PHASES in seconds; 0 before it was measured."""
        return median(self._measured[phase] or (0.0,))

    def with_update(self, seconds: float | None) -> dict[str, float]:
        """Forecast in seconds by phase. `seconds`: forecast of the update; None to leave it out. Phases that were not
        measured yet are omitted."""
        medians = {phase: median(measured) for phase, measured in self._measured.items() if measured}
        return medians if seconds is None else {**medians, "update": seconds}
