"""The newest steps of a rank as the few figures that are compared, in memory that does not grow."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple, Self

from tidegate.wire.step import StepReport

STEPS_KEPT: Final = 256
"""Of each rank, here and in the database."""
PHASES: Final = ("forward", "backward", "update")
_WIDTH: Final = 5


class Figures(NamedTuple):
    """One step. `seconds` is forward, backward and update; `peak_bytes` is of device memory. None: it was not told."""

    step: int
    seconds: float
    exposed_seconds: float
    update_seconds: float | None
    peak_bytes: float | None
    skipped: bool

    @classmethod
    def of(cls, step: StepReport) -> Self:
        phases = step.phase_seconds
        return cls(
            step.step,
            sum(phases.get(phase, 0.0) for phase in PHASES),
            sum(step.exposed_seconds.values()) if step.exposed_seconds else phases.get("update", 0.0),
            phases.get("update"),
            max(step.device_memory_peak_bytes.values(), default=None),
            step.skipped,
        )


class Window:
    """The newest `STEPS_KEPT` steps, oldest first. Takes 12 kB with the first, where reports take 1 MB."""

    def __init__(self, newest: int = -1) -> None:
        self.newest = newest
        """Number of the newest step; -1 before the first. Outlives `clear`."""
        self._steps, self._figures, self._count = array("q"), array("d"), 0

    def __len__(self) -> int:
        return min(self._count, STEPS_KEPT)

    def __iter__(self) -> Iterator[Figures]:
        for number in range(self._count - len(self), self._count):
            at = number % STEPS_KEPT
            seconds, exposed, update, peak, skipped = self._figures[at * _WIDTH : (at + 1) * _WIDTH]
            yield Figures(self._steps[at], seconds, exposed, _known(update), _known(peak), bool(skipped))

    @property
    def oldest(self) -> int:
        """Number of the oldest step when the window is full, else -1."""
        return self._steps[self._count % STEPS_KEPT] if self._count >= STEPS_KEPT else -1

    def add(self, figures: Figures) -> None:
        if not self._steps:
            self._steps = array("q", bytes(8 * STEPS_KEPT))
            self._figures = array("d", bytes(8 * _WIDTH * STEPS_KEPT))
        at = self._count % STEPS_KEPT
        step, seconds, exposed, update, peak, skipped = figures
        row = (seconds, exposed, math.nan if update is None else update, math.nan if peak is None else peak, skipped)
        self._figures[at * _WIDTH : (at + 1) * _WIDTH] = array("d", row)
        self._steps[at] = self.newest = step
        self._count += 1

    def clear(self) -> None:
        """Gives its memory back, too."""
        self._steps, self._figures, self._count = array("q"), array("d"), 0


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
