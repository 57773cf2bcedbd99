"""Live rates: a running median of each speed over the last steps, robust to outliers, fast to follow lasting
changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from tidegate.speeds.dispatch_latency import Latencies, StepTrace, median_by_lane, step_latencies
from tidegate.speeds.rate_card import MeasuredWork, RateCard

WINDOW_STEPS: Final = 16
"""Window of the median, in steps: up to a third of them may be outliers."""
DRIFT: Final = 0.25
"""Smallest relative deviation from the median that counts as a change of speed (a drift) if it lasts; smaller
deviations are noise."""
PERSISTENT_STEPS: Final = 4
"""Number of newest steps that must all deviate from the median in the same direction to count as a lasting change. Then
the rate is computed from these steps only, and earlier steps are discarded."""
TYPICAL_STEPS: Final = 8
"""Fewest earlier steps (before the last PERSISTENT_STEPS) from which the typical value, their median, is computed.
With fewer steps and noise of ±20 %, a drift would be reported where there is none."""

LATE_STEPS: Final = 2
"""Number of newest steps in which dispatch latencies (delays until the thread of a lane starts an op) are measured: not
more, because a step has many ops, and each costs time to analyse."""


def drifted(values: Sequence[float]) -> bool:
    """Whether the last PERSISTENT_STEPS of these positive values all deviate from the median of the values before, in
    the same direction, by more than DRIFT."""
    before, last = values[:-PERSISTENT_STEPS], values[-PERSISTENT_STEPS:]
    if len(before) < TYPICAL_STEPS:
        return False
    lowest, highest = min(last), max(last)
    if lowest <= (1 + DRIFT) * min(before) and (1 + DRIFT) * highest >= max(before):
        return False  # whatever the median is: this is the usual case, and runs after every training step
    typical = median(before)
    return lowest > (1 + DRIFT) * typical or (1 + DRIFT) * highest < typical


class LiveRates:
    """Estimates present rates from the last measured steps. Call `observe` after each step; `card` is the rate card for
    predictions.

    The highest speeds ever reached (ceilings), which never decrease, are not part of this class.

    known: initial rates; each of them is used until a step has measured that rate.
    """

    def __init__(self, known: RateCard | None = None) -> None:
        self.recalibrations = 0
        """Number of times a rate was reset after a lasting change."""
        self._steps: dict[str, deque[tuple[int, float]]] = {}
        self._traces: deque[StepTrace] = deque(maxlen=LATE_STEPS)
        """Steps whose dispatch latencies are not analysed yet."""
        self._latencies: deque[Latencies] = deque(maxlen=LATE_STEPS)
        self._late: dict[str, float] = {}
        """Last measured dispatch latency of each lane. It is kept for lanes that have no measurable op under the
        present knobs."""
        self._card = known
        self._is_old = False

    def observe(self, step: MeasuredWork, trace: StepTrace | None = None) -> tuple[str, ...]:
        """Adds one step: amount and seconds of each rate, and its trace, which is analysed when `card` is read.

        Returns the names of the rates that were reset because of a lasting change.
        """
        if trace is not None:
            self._traces.append(trace)
        reset = tuple(name for name, (amount, seconds) in step.items() if amount > 0 and seconds > 0
                      and self._add_sample(name, amount, seconds))  # fmt: skip
        self.recalibrations += len(reset)
        self._is_old = True
        return reset

    def _add_sample(self, name: str, amount: int, seconds: float) -> bool:
        """Adds one step to the window of a rate. Returns whether the rate was reset because of a lasting change."""
        steps = self._steps.setdefault(name, deque(maxlen=WINDOW_STEPS))
        steps.append((amount, seconds))
        if not drifted([spent / moved for moved, spent in steps]):
            return False
        kept = list(steps)[-PERSISTENT_STEPS:]
        steps.clear()
        steps.extend(kept)
        return True

    @property
    def card(self) -> RateCard | None:
        """The rate card: median rates, and the initial rates where no step was measured. None before the first step if
        there are no initial rates."""
        if self._is_old:
            card = RateCard.from_measured_work(_median_steps(self._steps), previous=self._card)
            self._latencies.extend(map(step_latencies, self._traces))
            self._traces.clear()
            self._late |= median_by_lane(self._latencies)
            self._card = replace(card, op_seconds={**card.op_seconds, **self._late})
            self._is_old = False
        return self._card


def _median_steps(steps: Mapping[str, Sequence[tuple[int, float]]]) -> list[MeasuredWork]:
    """For each rate, the work of the step with the median speed. If the number of steps is even, there are two such
    steps: the second is in the second element of the list."""
    middle: list[MeasuredWork] = [{}, {}]
    for name, found in steps.items():
        ordered = sorted(found, key=lambda step: step[1] / step[0])
        half = len(ordered) // 2
        middle[0][name] = ordered[half]
        if len(ordered) % 2 == 0:
            middle[1][name] = ordered[half - 1]
    return middle
