"""The tuner: moves what is `auto`, only for a predicted gain over a threshold, and stays only where it measures it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import median
from typing import Final, NamedTuple

from tidegate.plan.effective_knobs import Effective
from tidegate.speeds.live_rates import PERSISTENT_STEPS, WINDOW_STEPS, drifted

log = logging.getLogger("tidegate")

FIRST_LOOK_STEPS: Final = 6
"""Steps until the first look, and after a trial that was clearly good: rates settle, and what came of it shows."""
LONGEST_WAIT_STEPS: Final = 64
"""Each look that finds nothing better doubles the steps until the next, up to this: looking costs time too."""
LOOK_SHARE: Final = 3e-4
"""Share of the time that looks may take."""
URGENT_SHARE: Final = 1e-3
"""The same for those after a drift, which spend what was saved of it."""
SAVED_SECONDS: Final = 0.25
"""At most so much is saved, or one look; it is there from the beginning: a run may drift more than once soon after its
start, where a look costs tens of milliseconds."""
MINIMUM_GAIN: Final = 0.03
"""Share of the update time that a move must promise."""
PROVEN_GAIN: Final = MINIMUM_GAIN / 2
"""Share of the update time that must be measured of it."""
SETTLE_STEPS: Final = 1
"""Steps after each change that are not counted: state moves to its new places."""
BLOCK_STEPS: Final = 3
"""Steps of the new knobs' first turn that are counted, against as many of the old ones just before."""
LONG_BLOCK_STEPS: Final = 6
"""Those of each further turn, where the first ones did not make it clear: longer ones, for each change costs."""
TURNS: Final = 3
"""New knobs, old ones, new ones: then medians decide."""
REST_STEPS: Final = 50
"""Steps of rest for each change that a comparison has made, unless its gain was clear."""
OWN_STEPS: Final = 2 * WINDOW_STEPS
"""Steps after a change in which speeds that change may do so because of it."""
REFUTED_STEPS: Final = 512
"""Steps for which knobs that did not hold what was predicted are not tried again, while speeds stay."""


class Move(NamedTuple):
    """Knobs that are predicted to be better, and by which share of the update; None for a probe: nobody can tell."""

    to: Effective
    gain: float | None


@dataclass
class _Trial:
    """Old and new knobs take turns. `times` are the counted updates of each, in seconds."""

    old: Effective
    move: Move
    times: dict[bool, list[float]]
    """By whether they were the new knobs'."""
    new_runs: bool = True
    block: int = BLOCK_STEPS
    left: int = SETTLE_STEPS + BLOCK_STEPS
    changes: int = 1
    extended: bool = False
    disturbed: bool = False
    """Speeds have changed while it went on."""

    @property
    def runs(self) -> Effective:
        return self.move.to if self.new_runs else self.old

    def take(self, seconds: float) -> None:
        self.left -= 1
        if self.left < self.block:
            self.times[self.new_runs].append(seconds)

    def extend(self) -> bool:
        """Goes on with the first turn once: one odd step in it must not cost two changes of knobs and twelve steps."""
        if self.extended or self.changes > 1:
            return False
        self.extended, self.left = True, self.block
        return True

    def turn(self) -> Effective:
        self.new_runs, self.block, self.left = not self.new_runs, LONG_BLOCK_STEPS, SETTLE_STEPS + LONG_BLOCK_STEPS
        self.changes += 1
        return self.runs

    @property
    def is_clear(self) -> bool:
        """Every counted step with the new knobs was faster than every one with the old; of the twice as many of a turn
        that was extended, all but one. By chance, 1 in 20 and 1 in 21 comparisons of equals would look so."""
        slowest = sorted(self.times[True])[-2 if self.extended else -1]
        return slowest < (1 - PROVEN_GAIN) * min(self.times[False])

    def verdict(self) -> bool | None:
        """Whether the new knobs stay; None to go on comparing."""
        if self.is_clear:
            return True
        if min(self.times[True]) > max(self.times[False]):
            return False
        decided = self.move.gain is None or self.changes >= TURNS
        return self.gain >= PROVEN_GAIN if decided else None

    @property
    def gain(self) -> float:
        return 1 - median(self.times[True]) / median(self.times[False])


class Tuner:
    """Compares by turns what it runs with what is predicted to be better. Told of each update, asked once a step.

    Deterministic: the same calls at the same times of `clock` (seconds) give the same proposals; the clock only decides
    how soon a look is `due`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = 0
        self._changed_at = self._rests_until = 0
        self._steps_left = self._wait_steps = FIRST_LOOK_STEPS
        self._look_at = 0.0
        self._cost = 0.0
        """Seconds that the last look took."""
        self._saved, self._saved_at = SAVED_SECONDS, clock()
        self._urgent = False
        """Something has changed since the last look: the next one waits for less, from `_urgent_from` on."""
        self._urgent_from = 0
        """A step: where speeds change all the time, looks must be few."""
        self._recent: deque[tuple[Effective, float]] = deque(maxlen=WINDOW_STEPS)
        self._trial: _Trial | None = None
        self._refuted: dict[Effective, int] = {}
        """The step from which on each kind of move may be tried again."""
        self.last_verdict = ""
        """What came of the last comparison, as a sentence."""

    def observe(self, ran: Effective, seconds: float) -> None:
        """An update under the knobs `ran` took so long."""
        self._recent.append((ran, seconds))
        trial = self._trial
        if trial is not None:
            if ran == trial.runs:
                trial.take(seconds)
        elif drifted(self._under(ran)):
            newest = list(self._recent)[-PERSISTENT_STEPS:]
            self._recent.clear()
            self._recent.extend(newest)
            log.info("tuner: updates take %.3g s now, and that has lasted", median(s for _, s in newest))
            self._look_anew()

    def speeds_changed(self) -> None:
        """A rate has changed for good, though updates may take as long as before: another one decides.

        Soon after a change of knobs that may be because of it: it says nothing against what was found then, and waits
        for the end of the comparison and of the rest.
        """
        if self._trial is not None:
            self._trial.disturbed = True
        elif self._steps - self._changed_at >= OWN_STEPS:
            self._look_anew()
        else:
            self._look_after_drift(max(1, self._rests_until - self._steps))

    def due(self, now: Effective) -> bool:
        """Whether it is time for a look from the knobs `now`."""
        if self._trial is not None or self._steps_left > 1:
            return False
        urgent = self._urgent and self._steps >= self._urgent_from
        on_time = self._clock() >= self._look_at or (urgent and self._savings() >= self._cost)
        return on_time and self._before(now) is not None

    def _savings(self) -> float:
        """Seconds that looks after a drift may take now."""
        elapsed, self._saved_at = self._clock() - self._saved_at, self._clock()
        self._saved = min(self._saved + URGENT_SHARE * elapsed, max(SAVED_SECONDS, self._cost))
        return self._saved

    def propose(self, now: Effective, look: Callable[[], Move | None] | None = None) -> Effective | None:
        """The knobs to go on with, or None to stay. To be called once a step.

        look: asks the model; given when a look is `due`, and then called once whatever else is so, since other ranks
        may be waiting in it. A move that turns out to be impossible is to be told by `refuse`. Knobs that others change
        end a comparison.
        """
        self._steps += 1
        self._steps_left -= 1
        move = self._looked(look) if look is not None else None
        if self._trial is not None:
            return self._go_on(self._trial, now)
        before = self._before(now)
        if look is None or before is None:
            return None
        if move is None or not self._is_worth(now, move):
            self._wait(min(2 * self._wait_steps, LONGEST_WAIT_STEPS))
            return None
        self._trial = _Trial(now, move, {False: before, True: []})
        self._changed_at = self._steps
        return move.to

    def _looked(self, look: Callable[[], Move | None]) -> Move | None:
        if self._urgent:
            self._urgent, self._urgent_from = False, self._steps + OWN_STEPS
        began = self._clock()
        move = look()
        ended = self._clock()
        self._cost = ended - began
        self._look_at = ended + self._cost / LOOK_SHARE
        self._saved = self._savings() - self._cost
        return move

    def refuse(self, why: object) -> Effective | None:
        """What was proposed cannot be had. Returns the knobs to go back to; None where no comparison was under way."""
        trial, self._trial = self._trial, None
        if trial is None:
            return None
        self._recent.clear()  # some ranks ran something else meanwhile, and all must go on alike
        self._refute(trial)
        self._wait(LONGEST_WAIT_STEPS)
        self._urgent = self._urgent or trial.disturbed
        self.last_verdict = f"Not tried: {why}"
        return trial.old

    def _is_worth(self, now: Effective, move: Move) -> bool:
        refuted = self._refuted.get(_kind(now, move.to), 0) > self._steps
        return not refuted and (move.gain is None or move.gain >= MINIMUM_GAIN)

    def _under(self, now: Effective) -> list[float]:
        """The last updates in a row under `now`."""
        return [
            seconds for _, seconds in takewhile(lambda one: one[0] is now or one[0] == now, reversed(self._recent))
        ][::-1]

    def _before(self, now: Effective) -> list[float] | None:
        """The last counted updates under `now`; None while there are too few."""
        times = self._under(now)
        return times[-BLOCK_STEPS:] if len(times) >= SETTLE_STEPS + BLOCK_STEPS else None

    def _go_on(self, trial: _Trial, now: Effective) -> Effective | None:
        if now != trial.runs:
            self._trial = None
            self._rest(FIRST_LOOK_STEPS, 0)
            self._urgent = self._urgent or trial.disturbed
            return None
        if trial.left > 0:
            return None
        kept = trial.verdict() if trial.new_runs else None
        if kept is None and trial.new_runs and trial.extend():
            return None
        return trial.turn() if kept is None else self._end(trial, kept)

    def _end(self, trial: _Trial, kept: bool) -> Effective | None:
        """To the old knobs where the new ones are not kept."""
        self._trial = None
        self._changed_at = self._steps
        self._tell(trial, kept)
        if not kept:
            trial.turn()
            self._refute(trial)
        if trial.move.gain is None:
            self._rest(1, 0)  # that is what the probe was for
            self._urgent, self._urgent_from, self._saved = True, 0, max(self._saved, self._cost)
        elif kept and trial.is_clear:
            self._rest(FIRST_LOOK_STEPS, 0)
        else:
            self._rest(LONGEST_WAIT_STEPS, REST_STEPS * trial.changes)
        self._urgent = self._urgent or trial.disturbed
        return None if kept else trial.old

    def _refute(self, trial: _Trial) -> None:
        self._refuted = {one: step for one, step in self._refuted.items() if step > self._steps}
        self._refuted[_kind(trial.old, trial.move.to)] = self._steps + REFUTED_STEPS

    def _tell(self, trial: _Trial, kept: bool) -> None:
        predicted = "a probe" if trial.move.gain is None else f"{trial.move.gain:+.1%} predicted"
        self.last_verdict = (
            f"{difference(trial.old, trial.move.to)}: {trial.gain:+.1%} of the update measured, {predicted}; "
            f"{'kept' if kept else 'taken back'}."
        )
        log.info("tuner: %s", self.last_verdict)

    def _look_anew(self) -> None:
        """What was found before may no longer hold."""
        self._refuted.clear()
        self._rests_until = self._steps
        self._look_after_drift()

    def _look_after_drift(self, steps: int = 1) -> None:
        self._wait(steps)
        self._urgent = True

    def _rest(self, wait_steps: int, rest_steps: int) -> None:
        """A comparison is over: the next look comes after both, and one after a drift after the rest."""
        self._rests_until = self._steps + rest_steps
        self._wait(max(wait_steps, rest_steps))

    def _wait(self, steps: int) -> None:
        self._steps_left = self._wait_steps = steps


def _kind(old: Effective, new: Effective) -> Effective:
    """The knobs that a move leads to, with 1 for a larger cache: how far it can grow differs a little at every look."""
    return replace(new, host_cache_bytes=int(new.host_cache_bytes > old.host_cache_bytes))


def difference(old: Effective, new: Effective) -> str:
    """What the tuner moves, in words."""
    words = [f"stride {old.stride} → {new.stride}"] if old.stride != new.stride else []
    if old.alternate != new.alternate:
        words.append(f"order {'alternate' if new.alternate else 'pinned'}")
    if old.host_cache_bytes != new.host_cache_bytes:
        words.append(f"host_cache {old.host_cache_bytes:,} → {new.host_cache_bytes:,} bytes")
    return ", ".join(words) or "nothing"
