"""The tuner: moves what is `auto`, only for a predicted gain over a threshold, and stays only where it measures it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from tidegate.plan.effective import Effective

log = logging.getLogger("tidegate")

FIRST_LOOK_STEPS: Final = 8
"""Steps until the first look, and after a trial that was kept: rates settle, and what came of it shows."""
LONGEST_WAIT_STEPS: Final = 64
"""Each look that finds nothing better doubles the steps until the next, up to this: looking costs time too."""
LOOK_SHARE: Final = 1e-3
"""Share of the time that looks may take."""
MINIMUM_GAIN: Final = 0.05
"""Share of the update time that a move must promise."""
PROVEN_GAIN: Final = MINIMUM_GAIN / 2
"""Share of the update time that must be measured of it."""
SETTLE_STEPS: Final = 1
"""Steps after each change that are not counted: state moves to its new places."""
BLOCK_STEPS: Final = 3
"""Steps of each turn in a comparison that are counted."""
ROUNDS: Final = 3
"""Turns of the new knobs, with the old ones in between, until medians decide."""
REFUTED_STEPS: Final = 512
"""Steps for which knobs that did not hold what was predicted are not tried again."""


class Move(NamedTuple):
    """Knobs that are predicted to be better, and by which share of the update."""

    to: Effective
    gain: float


@dataclass
class _Trial:
    """Old and new knobs take turns. `times` are the counted updates of each, in seconds."""

    old: Effective
    move: Move
    times: dict[bool, list[float]]
    """By whether they were the new knobs'."""
    new_runs: bool = True
    left: int = SETTLE_STEPS + BLOCK_STEPS
    rounds: int = 0

    def take(self, seconds: float) -> None:
        self.left -= 1
        if self.left < BLOCK_STEPS:
            self.times[self.new_runs].append(seconds)

    def verdict(self) -> bool | None:
        """Whether the new knobs stay; None to go on comparing."""
        old, new = self.times[False], self.times[True]
        if max(new) < (1 - PROVEN_GAIN) * min(old):
            return True
        if min(new) > max(old):
            return False
        return self.gain >= PROVEN_GAIN if self.rounds >= ROUNDS else None

    @property
    def gain(self) -> float:
        return 1 - median(self.times[True]) / median(self.times[False])


class Tuner:
    """Compares by turns what it runs with what is predicted to be better. Told of each update, asked once a step.

    Deterministic: the same calls at the same times of `clock` (seconds) give the same proposals.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = 0
        self._steps_left = self._wait_steps = FIRST_LOOK_STEPS
        self._look_at = 0.0
        self._recent: deque[tuple[Effective, float]] = deque(maxlen=SETTLE_STEPS + BLOCK_STEPS)
        self._trial: _Trial | None = None
        self._refuted: dict[Effective, int] = {}
        """The step from which on each may be tried again."""
        self.last_verdict = ""
        """What came of the last comparison, as a sentence."""

    def observe(self, ran: Effective, seconds: float) -> None:
        """An update under the knobs `ran` took so long."""
        self._recent.append((ran, seconds))
        trial = self._trial
        if trial is not None and ran == (trial.move.to if trial.new_runs else trial.old):
            trial.take(seconds)

    def propose(self, now: Effective, look: Callable[[], Move | None]) -> Effective | None:
        """The knobs to go on with, or None to stay. `look` asks the model; it is called rarely.

        A move that turns out to be impossible is to be told by `refuse`. Knobs that others change end a comparison.
        """
        self._steps += 1
        if self._trial is not None:
            return self._go_on(self._trial, now)
        self._steps_left -= 1
        before = self._before(now)
        if self._steps_left > 0 or self._clock() < self._look_at or before is None:
            return None
        began = self._clock()
        move = look()
        ended = self._clock()
        self._look_at = ended + (ended - began) / LOOK_SHARE
        if move is None or move.gain < MINIMUM_GAIN or self._refuted.get(move.to, 0) > self._steps:
            self._wait(min(2 * self._wait_steps, LONGEST_WAIT_STEPS))
            return None
        self._trial = _Trial(now, move, {False: before, True: []})
        return move.to

    def refuse(self, why: object) -> None:
        """What was proposed cannot be had."""
        if self._trial is not None:
            self._end(self._trial, kept=False)
            self.last_verdict = f"Not tried: {why}"

    def _before(self, now: Effective) -> list[float] | None:
        """The last updates under `now`; None while there are too few."""
        times = [seconds for ran, seconds in self._recent if ran == now]
        return times[-BLOCK_STEPS:] if len(times) == self._recent.maxlen else None

    def _go_on(self, trial: _Trial, now: Effective) -> Effective | None:
        if now != (trial.move.to if trial.new_runs else trial.old):
            self._trial = None
            self._wait(FIRST_LOOK_STEPS)
            return None
        if trial.left > 0:
            return None
        if trial.new_runs:
            trial.rounds += 1
            kept = trial.verdict()
            if kept is not None:
                self._end(trial, kept)
                self._tell(trial, kept)
                return None if kept else trial.old
        trial.new_runs, trial.left = not trial.new_runs, SETTLE_STEPS + BLOCK_STEPS
        return trial.move.to if trial.new_runs else trial.old

    def _end(self, trial: _Trial, kept: bool) -> None:
        self._trial = None
        self._recent.clear()
        self._wait(FIRST_LOOK_STEPS if kept else LONGEST_WAIT_STEPS)
        if not kept:
            self._refuted = {one: step for one, step in self._refuted.items() if step > self._steps}
            self._refuted[trial.move.to] = self._steps + REFUTED_STEPS

    def _tell(self, trial: _Trial, kept: bool) -> None:
        stride = f"stride {trial.old.stride} → {trial.move.to.stride}"
        order = "" if trial.old.alternate == trial.move.to.alternate else ", the other order"
        self.last_verdict = (
            f"{stride}{order}: {trial.gain:+.1%} of the update measured, {trial.move.gain:+.1%} predicted; "
            f"{'kept' if kept else 'taken back'}."
        )
        log.info("tuner: %s", self.last_verdict)

    def _wait(self, steps: int) -> None:
        self._steps_left = self._wait_steps = steps
