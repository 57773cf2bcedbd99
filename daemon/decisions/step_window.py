"""Window of the newest steps of a rank: a ring buffer of fixed size with the few figures that decisions need."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple, Self

from tidegate.wire.step import StepReport

STEPS_KEPT: Final = 256
"""Maximum number of steps that are kept for each rank, the newest ones. In the database this limit
applies after each deletion of old steps."""
PHASES: Final = ("forward", "backward", "update")
_WIDTH: Final = 5
"""How many numbers are stored for each step."""


class StepFigures(NamedTuple):
    """Figures of one step. None: the rank did not report the figure.

    `seconds` is the sum of forward, backward and update; `peak_bytes` is the peak use of device memory.
    """

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


class StepWindow:
    """The newest `STEPS_KEPT` steps of a rank, oldest first. It takes 12 kB of memory as soon as it has one step; the
    complete step reports would take 1 MB."""

    def __init__(self, newest: int = -1) -> None:
        self.newest = newest
        """Number of the newest step; -1 before the first. `clear` does not change it."""
        self._steps, self._figures, self._count = array("q"), array("d"), 0

    def __len__(self) -> int:
        return min(self._count, STEPS_KEPT)

    def __iter__(self) -> Iterator[StepFigures]:
        for number in range(self._count - len(self), self._count):
            at = number % STEPS_KEPT
            seconds, exposed, update, peak, skipped = self._figures[at * _WIDTH : (at + 1) * _WIDTH]
            yield StepFigures(self._steps[at], seconds, exposed, _known(update), _known(peak), bool(skipped))

    @property
    def oldest(self) -> int:
        """Step number of the oldest step if the window is full; -1 while it has room. Steps with smaller numbers are
        not needed any more."""
        return self._steps[self._count % STEPS_KEPT] if self._count >= STEPS_KEPT else -1

    def add(self, figures: StepFigures) -> None:
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
        """Removes all steps and frees their memory."""
        self._steps, self._figures, self._count = array("q"), array("d"), 0


def _known(value: float) -> float | None:
    """The value; None for NaN, which stands for a figure that was not reported."""
    return None if math.isnan(value) else value
