"""Live rates: what the last steps show of each speed, deaf to single odd steps, quick where a speed has changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from tidegate.speeds.dispatch_latency import Ran, Waits, typical, waits_of
from tidegate.speeds.rate_card import RateCard, Seen

WINDOW_STEPS: Final = 16
"""A rate is the median of so many steps: a third of them may be odd ones."""
DRIFT: Final = 0.25
"""What is off by more is no noise, once it has lasted."""
PERSISTENT_STEPS: Final = 4
"""Steps in a row, all off on the same side, after which what was before them is forgotten."""
TYPICAL_STEPS: Final = 8
"""Steps before them that it takes to say what is typical: with noise of ±20 % fewer would see drift where none is."""

LATE_STEPS: Final = 2
"""Steps that are looked at for how late ops begin: a step has many, and each costs time."""


def drifted(values: Sequence[float]) -> bool:
    """Whether the last PERSISTENT_STEPS of these positive values have all left the median of those before, one way."""
    before, last = values[:-PERSISTENT_STEPS], values[-PERSISTENT_STEPS:]
    if len(before) < TYPICAL_STEPS:
        return False
    typical = median(before)
    return min(last) > (1 + DRIFT) * typical or (1 + DRIFT) * max(last) < typical


class LiveRates:
    """Rates by name from step to step. Told of each step; gives the card that predictions go by.

    Ceilings are none of its business: what was once reached stays reached however slow a lane has become.

    known: from elsewhere; each of its rates counts until a step has shown it.
    """

    def __init__(self, known: RateCard | None = None) -> None:
        self.recalibrations = 0
        """How often a rate was taken anew, because what it was before no longer holds."""
        self._steps: dict[str, deque[tuple[int, float]]] = {}
        self._ran: deque[Ran] = deque(maxlen=LATE_STEPS)
        """Steps that nobody has looked at yet."""
        self._waits: deque[Waits] = deque(maxlen=LATE_STEPS)
        self._late: dict[str, float] = {}
        """By lane, as last seen: under some knobs no op of a lane waits for anything."""
        self._card = known
        self._is_old = False

    def observe(self, step: Seen, ran: Ran | None = None) -> tuple[str, ...]:
        """What one step showed of each rate, and what ran in it, which is looked at when a card is asked for. Returns
        the names of the rates that were taken anew."""
        if ran is not None:
            self._ran.append(ran)
        anew = tuple(name for name, (amount, seconds) in step.items() if amount > 0 and seconds > 0
                     and self._take(name, amount, seconds))  # fmt: skip
        self.recalibrations += len(anew)
        self._is_old = True
        return anew

    def _take(self, name: str, amount: int, seconds: float) -> bool:
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
        """The medians, and of what was never seen what is known. None before the first step where nothing is."""
        if self._is_old:
            card = RateCard.from_seen(_middle(self._steps), previous=self._card)
            self._waits.extend(map(waits_of, self._ran))
            self._ran.clear()
            self._late |= typical(self._waits)
            self._card = replace(card, op_seconds={**card.op_seconds, **self._late})
            self._is_old = False
        return self._card


def _middle(steps: Mapping[str, Sequence[tuple[int, float]]]) -> list[Seen]:
    """For each rate the step with the median speed, or the two in the middle."""
    middle: list[Seen] = [{}, {}]
    for name, found in steps.items():
        ordered = sorted(found, key=lambda step: step[1] / step[0])
        half = len(ordered) // 2
        middle[0][name] = ordered[half]
        if len(ordered) % 2 == 0:
            middle[1][name] = ordered[half - 1]
    return middle
