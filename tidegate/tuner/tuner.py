"""The tuner: changes knobs that are `auto` if a gain above a threshold is predicted, compares new with old knobs by
measurement, and reverts the change if the gain is not measured.

Words of this module: a search looks for better knobs with the simulator; a move is the change of knobs that a search
proposes; a trial compares the old and the new knobs in turns of some steps; a probe is a move whose gain cannot be
predicted; a drift is a lasting change of speeds.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, NamedTuple

from tidegate.comparison import Comparison, compare
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.speeds.live_rates import PERSISTENT_STEPS, WINDOW_STEPS, drifted

log = logging.getLogger("tidegate")

FIRST_SEARCH_STEPS: Final = 6
"""Steps before the first search, and between a trial with a clear gain and the next search. During these steps the
measured rates become stable."""
LONGEST_WAIT_STEPS: Final = 64
"""Largest number of steps between two searches. Each search that finds nothing better doubles the wait, because a
search costs time."""
SEARCH_SHARE: Final = 1e-4
"""Largest share of the run's time for searches."""
URGENT_SHARE: Final = 1e-3
"""Share of the run's time by which the time budget for urgent searches grows. A search is urgent after a drift (a
lasting change of speeds): it does not wait for its regular time."""
SAVED_SECONDS: Final = 0.25
"""Largest unused budget for searches after a drift, in seconds (or the time of one search, if that is longer). A run
begins with this budget, because rates may drift more than once soon after the start, when a search takes tens of
milliseconds."""
MINIMUM_GAIN: Final = 0.03
"""Smallest predicted gain of a move, as a share of the update time."""
PROVEN_GAIN: Final = MINIMUM_GAIN / 2
"""Smallest measured gain with which new knobs are kept, as a share of the update time."""
ERROR_RATE: Final = 1 / 20
"""Largest probability of a result by chance alone with which it ends a trial early. It is larger than that of a canary,
because each further turn costs time."""
UNCOUNTED_STEPS: Final = 1
"""Steps after each change of knobs that are not counted, because state moves to its new residences."""
BLOCK_STEPS: Final = 3
"""Number of steps with the new knobs in the first turn of a trial (old and new knobs take turns; after each change,
UNCOUNTED_STEPS steps are left out). Fewest steps of the old knobs before a trial."""
OLD_STEPS: Final = 5
"""Largest number of steps of the old knobs just before the trial with which the new knobs are compared. With five of
them, one outlier in an extended turn does not hide a clear gain."""
LONG_BLOCK_STEPS: Final = 6
"""Number of counted steps of each further turn, if the first turn gave no clear result. These turns are longer, because
each change of knobs costs time."""
TURNS: Final = 3
"""Largest number of turns of a trial: one turn with the new knobs, one with the old, and one with the new again. If the
last turn gives no clear result, the measured shift decides."""
REST_STEPS: Final = 50
"""Number of steps of the pause after a trial without a clear gain, for each change of knobs in the trial: after two
changes the pause has twice as many steps."""
OWN_STEPS: Final = 2 * WINDOW_STEPS
"""Number of steps after a change of knobs in which a drift (a lasting change of speeds) may be an effect of that
change."""
LONGEST_URGENT_WAIT_STEPS: Final = 8 * OWN_STEPS
"""Largest value of the wait between two urgent searches, in steps. The wait begins with OWN_STEPS. Each urgent search
that finds nothing better doubles it, because a rate that is measured on short ops may seem to drift again and again
while updates take as long as before. A drift of the update time, or a move, sets it back to OWN_STEPS."""
REFUTED_STEPS: Final = 512
"""Number of steps for which the tuner does not try a move again after a trial did not measure its predicted gain. A
drift of speeds that is no effect of a change of knobs ends this time at once."""


class Move(NamedTuple):
    """A proposed change of knobs: the new knobs, and their predicted gain as a share of the update time.

    gain is None for a probe, whose gain cannot be predicted.
    """

    to: EffectiveKnobs
    gain: float | None


@dataclass
class _Trial:
    """A comparison of old and new knobs, which run in turns. `times`: seconds of the counted updates."""

    old: EffectiveKnobs
    move: Move
    times: dict[bool, list[float]]
    """Seconds of the counted updates. Key True: under the new knobs; key False: under the old knobs."""
    new_runs: bool = True
    """Whether the new knobs are in force in this turn."""
    block: int = BLOCK_STEPS
    left: int = UNCOUNTED_STEPS + BLOCK_STEPS
    changes: int = 1
    extended: bool = False
    disturbed: bool = False
    """Whether speeds drifted during the trial."""

    @property
    def runs(self) -> EffectiveKnobs:
        """The knobs that are in force in this turn."""
        return self.move.to if self.new_runs else self.old

    def take(self, seconds: float) -> None:
        """Adds the time of one update, in seconds, to this turn. The first steps after a change of knobs are not
        counted."""
        self.left -= 1
        if self.left < self.block:
            self.times[self.new_runs].append(seconds)

    def extend(self) -> bool:
        """Extends the first turn, at most once, and returns whether it was extended. In a longer turn, a single outlier
        does not make the result unclear. This is cheaper than further turns, which need two changes of knobs and twelve
        counted steps."""
        if self.extended or self.changes > 1:
            return False
        self.extended, self.left = True, self.block
        return True

    def turn(self) -> EffectiveKnobs:
        """Begins the next turn, and returns the knobs that are in force in it."""
        self.new_runs, self.block, self.left = not self.new_runs, LONG_BLOCK_STEPS, UNCOUNTED_STEPS + LONG_BLOCK_STEPS
        self.changes += 1
        return self.runs

    @property
    def compared(self) -> Comparison:
        """The comparison of the counted updates so far."""
        return compare(self.times[False], self.times[True])

    @property
    def is_clear(self) -> bool:
        """Whether the trial shows a gain of more than PROVEN_GAIN that is hardly chance."""
        found = self.compared
        return found.difference(PROVEN_GAIN * found.median_before, ERROR_RATE) == "faster"

    def verdict(self) -> bool | None:
        """Whether the new knobs are kept; None if another turn is needed."""
        found = self.compared
        if self.is_clear:
            return True
        if found.difference(error_rate=ERROR_RATE) == "slower":
            return False
        decided = self.move.gain is None or self.changes >= TURNS
        return -found.shift_share >= PROVEN_GAIN if decided else None


class Tuner:
    """Decides when to search for better knobs, and runs trials of the knobs found. Call `observe` for each update and
    `propose` once a step.

    Deterministic: the same calls at the same times of `clock` (seconds) give the same proposals; the clock only decides
    how soon a search is `due`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = 0
        self._changed_at = self._rests_until = 0
        self._steps_left = self._wait_steps = FIRST_SEARCH_STEPS
        self._search_at = 0.0
        self._cost = 0.0
        """Seconds that the last search took."""
        self._saved, self._saved_at = SAVED_SECONDS, clock()
        self._urgent = False
        """Whether speeds have changed since the last search. Then the next search waits less."""
        self._urgent_at, self._urgent_wait = -OWN_STEPS, OWN_STEPS
        """Step of the last urgent search, and the fewest steps from it to the next one. They limit the number of urgent
        searches when speeds change all the time."""
        self._recent: deque[tuple[EffectiveKnobs, float]] = deque(maxlen=WINDOW_STEPS)
        self._trial: _Trial | None = None
        self._refuted: dict[EffectiveKnobs, int] = {}
        """Moves whose predicted gain was not measured. Key: kind of the move (`_kind`); value: step from which it
        may be tried again."""
        self.last_verdict = ""
        """Result of the last trial, as a sentence."""

    def observe(self, knobs: EffectiveKnobs, seconds: float) -> None:
        """Adds one update: the knobs that were in force, and its seconds."""
        self._recent.append((knobs, seconds))
        trial = self._trial
        if trial is not None:
            if knobs == trial.runs:
                trial.take(seconds)
        elif drifted(self._under(knobs)):
            newest = list(self._recent)[-PERSISTENT_STEPS:]
            self._recent.clear()
            self._recent.extend(newest)
            log.info("tuner: the update time has changed to %.3g s and stays there", median(s for _, s in newest))
            self._urgent_wait = OWN_STEPS
            self._discard_findings()

    def speeds_changed(self) -> None:
        """Tells the tuner that a rate has drifted (changed for a lasting time). Call it even if updates take as long as
        before, because another resource decides their time.

        Soon after a change of knobs, the drift may be an effect of that change. Then earlier findings stay valid, and
        the next search waits for the end of the trial and of the pause after it.
        """
        if self._trial is not None:
            self._trial.disturbed = True
        elif self._steps - self._changed_at >= OWN_STEPS:
            self._discard_findings()
        else:
            self._search_after_drift(max(1, self._rests_until - self._steps))

    def due(self, now: EffectiveKnobs) -> bool:
        """Whether it is time for a search, if the knobs `now` are in force."""
        if self._trial is not None or self._steps_left > 1:
            return False
        urgent = self._urgent and self._steps >= self._urgent_at + self._urgent_wait
        on_time = self._clock() >= self._search_at or (urgent and self._urgent_budget() >= self._cost)
        return on_time and self._before(now) is not None

    def _urgent_budget(self) -> float:
        """The unused budget for searches after a drift, in seconds."""
        elapsed, self._saved_at = self._clock() - self._saved_at, self._clock()
        self._saved = min(self._saved + URGENT_SHARE * elapsed, max(SAVED_SECONDS, self._cost))
        return self._saved

    def propose(self, now: EffectiveKnobs, search: Callable[[], Move | None] | None = None) -> EffectiveKnobs | None:
        """The knobs for the next steps; None to keep the present knobs. Call this once a step.

        search: function that looks for better knobs. Pass it when a search is `due`, else None. A function that is
        passed is always called exactly once, because it may contain a collective operation in which other ranks wait.
        If the proposed knobs turn out to be impossible, call `refuse`. If another component changes the knobs, a
        running trial ends.
        """
        self._steps += 1
        self._steps_left -= 1
        urgent = self._urgent
        move = self._timed_search(search) if search is not None else None
        if self._trial is not None:
            return self._continue_trial(self._trial, now)
        if search is None or (before := self._before(now)) is None:
            return None
        if move is None or not self._is_worth(now, move):
            self._wait(min(2 * self._wait_steps, LONGEST_WAIT_STEPS))
            if urgent:
                self._urgent_wait = min(2 * self._urgent_wait, LONGEST_URGENT_WAIT_STEPS)
            return None
        self._urgent_wait = OWN_STEPS
        self._trial = _Trial(now, move, {False: before, True: []})
        self._changed_at = self._steps
        return move.to

    def _timed_search(self, search: Callable[[], Move | None]) -> Move | None:
        """Calls `search` and returns its result. The time of the call is taken from the time budget of searches."""
        if self._urgent:
            self._urgent, self._urgent_at = False, self._steps
        began = self._clock()
        move = search()
        ended = self._clock()
        self._cost = ended - began
        self._search_at = ended + self._cost / SEARCH_SHARE
        self._saved = self._urgent_budget() - self._cost
        return move

    def refuse(self, why: object) -> EffectiveKnobs | None:
        """Reports that the proposed knobs cannot be applied, for the reason `why`. Returns the knobs to restore; None
        if no trial was running."""
        trial, self._trial = self._trial, None
        if trial is None:
            return None
        self._recent.clear()  # some ranks may have run other knobs, and all ranks must continue in the same way
        self._refute(trial)
        self._wait(LONGEST_WAIT_STEPS)
        self._urgent = self._urgent or trial.disturbed
        self.last_verdict = f"Not tried: {why}"
        return trial.old

    def _is_worth(self, now: EffectiveKnobs, move: Move) -> bool:
        """Whether `move` was not refuted lately, and promises enough gain or is a probe."""
        refuted = self._refuted.get(_kind(now, move.to), 0) > self._steps
        return not refuted and (move.gain is None or move.gain >= MINIMUM_GAIN)

    def _under(self, now: EffectiveKnobs) -> list[float]:
        """Seconds of the last consecutive updates under the knobs `now`."""
        times = list[float]()
        for knobs, seconds in reversed(self._recent):
            if knobs is not now and knobs != now:
                break
            times.append(seconds)
        return times[::-1]

    def _before(self, now: EffectiveKnobs) -> list[float] | None:
        """Seconds of the last updates under the knobs `now`, at most OLD_STEPS; None if there are fewer than
        BLOCK_STEPS."""
        times = self._under(now)[UNCOUNTED_STEPS:][-OLD_STEPS:]
        return times if len(times) >= BLOCK_STEPS else None

    def _continue_trial(self, trial: _Trial, now: EffectiveKnobs) -> EffectiveKnobs | None:
        """Continues the trial after a step. At the end of a turn, returns the knobs of the next turn; at the end of the
        trial, returns the old knobs if they are restored. None to keep the present knobs.

        If `now` are not the knobs of this turn, another component has changed them: then the trial ends without a
        result.
        """
        if now != trial.runs:
            self._trial = None
            self._rest(FIRST_SEARCH_STEPS, 0)
            self._urgent = self._urgent or trial.disturbed
            return None
        if trial.left > 0:
            return None
        kept = trial.verdict() if trial.new_runs else None
        if kept is None and trial.new_runs and trial.extend():
            return None
        return trial.turn() if kept is None else self._end(trial, kept)

    def _end(self, trial: _Trial, kept: bool) -> EffectiveKnobs | None:
        """Ends the trial. Returns the old knobs if the new ones are not kept, else None."""
        self._trial = None
        self._changed_at = self._steps
        self._log_result(trial, kept)
        if not kept:
            trial.turn()
            self._refute(trial)
        if trial.move.gain is None:
            self._rest(1, 0)  # the probe has measured the missing rates: search again at once
            self._urgent, self._urgent_at, self._saved = True, -OWN_STEPS, max(self._saved, self._cost)
            self._urgent_wait = OWN_STEPS
        elif kept and trial.is_clear:
            self._rest(FIRST_SEARCH_STEPS, 0)
        else:
            self._rest(LONGEST_WAIT_STEPS, REST_STEPS * trial.changes)
        self._urgent = self._urgent or trial.disturbed
        return None if kept else trial.old

    def _refute(self, trial: _Trial) -> None:
        """Excludes the move of this trial for REFUTED_STEPS steps."""
        self._refuted = {kind: step for kind, step in self._refuted.items() if step > self._steps}
        self._refuted[_kind(trial.old, trial.move.to)] = self._steps + REFUTED_STEPS

    def _log_result(self, trial: _Trial, kept: bool) -> None:
        predicted = "a probe" if trial.move.gain is None else f"{trial.move.gain:+.1%} predicted"
        self.last_verdict = (
            f"{difference(trial.old, trial.move.to)}: {-trial.compared.shift_share:+.1%} of the update measured, "
            f"{predicted}; {'kept' if kept else 'taken back'}."
        )
        log.info("tuner: %s", self.last_verdict)

    def _discard_findings(self) -> None:
        """Discards earlier findings after a drift, and starts the next search soon."""
        self._refuted.clear()
        self._rests_until = self._steps
        self._search_after_drift()

    def _search_after_drift(self, steps: int = 1) -> None:
        self._wait(steps)
        self._urgent = True

    def _rest(self, wait_steps: int, rest_steps: int) -> None:
        """Begins the pause after a trial. The next regular search waits for the larger of both numbers of steps; a
        search after a drift waits for `rest_steps` only."""
        self._rests_until = self._steps + rest_steps
        self._wait(max(wait_steps, rest_steps))

    def _wait(self, steps: int) -> None:
        self._steps_left = self._wait_steps = steps


def _kind(old: EffectiveKnobs, new: EffectiveKnobs) -> EffectiveKnobs:
    """The kind of a move: the new knobs, with the bytes of the host cache replaced by 1 if it grows, else 0, because
    the size to which it can grow differs a little at every search."""
    return replace(new, host_cache_bytes=int(new.host_cache_bytes > old.host_cache_bytes))


def difference(old: EffectiveKnobs, new: EffectiveKnobs) -> str:
    """The changes of stride, order and host cache from `old` to `new`, as text."""
    words = [f"stride {old.stride} → {new.stride}"] if old.stride != new.stride else []
    if old.alternate != new.alternate:
        words.append(f"order {'alternate' if new.alternate else 'pinned'}")
    if old.host_cache_bytes != new.host_cache_bytes:
        words.append(f"host_cache {old.host_cache_bytes:,} → {new.host_cache_bytes:,} bytes")
    return ", ".join(words) or "nothing"
