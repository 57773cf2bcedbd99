"""When the tuner looks and moves, how it compares, what it keeps and what it takes back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from tidegate.knobs.knobs import Off
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.speeds.live_rates import PERSISTENT_STEPS
from tidegate.tuner.tuner import (
    BLOCK_STEPS,
    FIRST_SEARCH_STEPS,
    LONG_BLOCK_STEPS,
    LONGEST_URGENT_WAIT_STEPS,
    LONGEST_WAIT_STEPS,
    MINIMUM_GAIN,
    OWN_STEPS,
    REFUTED_STEPS,
    REST_STEPS,
    SAVED_SECONDS,
    SEARCH_SHARE,
    TURNS,
    UNCOUNTED_STEPS,
    Move,
    Tuner,
)

SLOW, FAST = EffectiveKnobs("off", 0.0), EffectiveKnobs(2.0, 0.0)
TURN = UNCOUNTED_STEPS + BLOCK_STEPS
LONG_TURN = UNCOUNTED_STEPS + LONG_BLOCK_STEPS


@dataclass
class Training:
    """Steps that take what `seconds` says of their knobs; the model predicts `promised`.

    On the tuner's clock a look takes `look_seconds`, a step `step_seconds`. speeds_change: the tuner is told so before
    each step.
    """

    seconds: Callable[[EffectiveKnobs], float]
    promised: Callable[[EffectiveKnobs], Move | None]
    look_seconds: float = 0.0
    step_seconds: float = 0.0
    speeds_change: bool = False
    now: EffectiveKnobs = SLOW
    step: int = 0
    clock: float = 0.0
    looks: list[int] = field(default_factory=list)
    moves: list[tuple[int, float | Off]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tuner = Tuner(clock=lambda: self.clock)

    def run(self, steps: int) -> Training:
        for _ in range(steps):
            self.step += 1
            if self.speeds_change:
                self.tuner.speeds_changed()
            self.tuner.observe(self.now, self.seconds(self.now))
            wanted = self.tuner.propose(self.now, self.look if self.tuner.due(self.now) else None)
            if wanted is not None:
                self.now = wanted
                self.moves.append((self.step, wanted.stride))
            self.clock += self.step_seconds
        return self

    def look(self) -> Move | None:
        self.looks.append(self.step)
        self.clock += self.look_seconds
        return self.promised(self.now)


def promise_fast(now: EffectiveKnobs) -> Move | None:
    return Move(FAST, 0.5) if now == SLOW else None


def test_a_clear_gain_is_kept_after_one_turn() -> None:
    """Within 20 steps of the start it runs what is best, and stays."""
    found = Training(lambda knobs: 1.0 if knobs == SLOW else 0.6, promise_fast).run(300)
    assert found.moves == [(FIRST_SEARCH_STEPS, 2.0)]
    assert found.now == FAST
    assert "40.0%" in found.tuner.last_verdict
    assert "kept" in found.tuner.last_verdict


def test_what_is_slower_is_taken_back_after_one_turn_and_not_tried_again_soon() -> None:
    found = Training(lambda knobs: 1.0 if knobs == SLOW else 1.2, promise_fast).run(REFUTED_STEPS)
    assert found.moves == [(FIRST_SEARCH_STEPS, 2.0), (FIRST_SEARCH_STEPS + TURN, "off")]
    assert "taken back" in found.tuner.last_verdict
    assert len(found.looks) > 2, "it goes on looking"
    assert len(found.run(REFUTED_STEPS).moves) == 4, "things change: it is tried again in the end"


@pytest.mark.parametrize(("fast", "kept"), [(0.96, True), (0.99, False)])
def test_what_is_not_clear_is_compared_by_turns(fast: float, kept: bool) -> None:
    """Noise is larger than the gain: old and new take turns, and medians decide."""
    noise = {SLOW: iter([0.95, 1.0, 1.05] * 100), FAST: iter([0.95, 1.0, 1.05] * 100)}
    found = Training(lambda knobs: next(noise[knobs]) * (1.0 if knobs == SLOW else fast), promise_fast)
    first = TURN + BLOCK_STEPS  # once more as long before anything is changed
    found.run(FIRST_SEARCH_STEPS + first + 2 * LONG_TURN)
    assert [stride for _, stride in found.moves[:TURNS]] == [2.0, "off", 2.0]
    assert [step for step, _ in found.moves[:TURNS]] == [6, 6 + first, 6 + first + LONG_TURN]
    assert found.now == (FAST if kept else SLOW)


def test_one_odd_step_of_a_clear_gain_costs_no_change() -> None:
    """The first turn goes on for three more steps, and is clear with all of them but the odd one: 20 steps in all."""
    fast = itertools.chain([0.6] * UNCOUNTED_STEPS, [0.6, 1.1, 0.6], itertools.repeat(0.6))
    found = Training(lambda knobs: 1.0 if knobs == SLOW else next(fast), promise_fast).run(20)
    assert found.moves == [(FIRST_SEARCH_STEPS, 2.0)]
    assert "kept" in found.tuner.last_verdict


def test_two_odd_steps_are_not_clear() -> None:
    steps = itertools.chain([0.6] * UNCOUNTED_STEPS, [1.1] * 2, itertools.repeat(0.6))
    found = Training(lambda knobs: 1.0 if knobs == SLOW else next(steps), promise_fast).run(
        FIRST_SEARCH_STEPS + TURN + 3
    )
    assert found.moves == [(FIRST_SEARCH_STEPS, 2.0), (FIRST_SEARCH_STEPS + TURN + 3, "off")]


def test_speeds_that_change_in_a_rest_are_looked_at_after_it() -> None:
    """A comparison that was not clear is followed by a rest; what is told in it is not forgotten."""
    noise = {SLOW: itertools.cycle([0.95, 1.0, 1.05]), FAST: itertools.cycle([0.95, 1.0, 1.05])}
    found = Training(
        lambda knobs: next(noise[knobs]) * (1.0 if knobs == SLOW else 0.96), promise_fast, look_seconds=1.0
    )
    found.run(FIRST_SEARCH_STEPS + TURN + BLOCK_STEPS + 2 * LONG_TURN)
    assert (found.now, found.looks) == (FAST, [FIRST_SEARCH_STEPS])
    found.tuner.speeds_changed()
    found.step_seconds = 15.0  # such a look may be had every hour, and after a drift every half hour
    rest = REST_STEPS * TURNS
    assert found.run(rest - 1).looks == [FIRST_SEARCH_STEPS]
    assert len(found.run(2).looks) == 2


@pytest.mark.parametrize("disturbed", [False, True])
def test_speeds_that_change_in_a_comparison_are_looked_at_after_it(disturbed: bool) -> None:
    """Looks are dear here: without a reason there is none for an hour."""
    found = Training(lambda knobs: 1.0 if knobs == SLOW else 0.6, promise_fast, look_seconds=0.1)
    found.run(FIRST_SEARCH_STEPS)
    found.step_seconds = 0.2
    found.run(2)
    if disturbed:
        found.tuner.speeds_changed()
    found.run(TURN - 2)
    assert "kept" in found.tuner.last_verdict
    assert len(found.run(FIRST_SEARCH_STEPS + 1).looks) == 1 + disturbed


def test_a_rest_is_over_when_a_later_comparison_is_clear() -> None:
    """The rest of the one before must not put off the look after a drift."""
    other, factor = EffectiveKnobs(3.0, 0.0), {SLOW: 1.0, FAST: 0.97}
    noise = itertools.cycle([0.97, 1.0, 1.03])
    found = Training(lambda knobs: next(noise) * factor[knobs], promise_fast)
    while not found.tuner.last_verdict:
        found.run(1)
    resting = found.now
    found.run(OWN_STEPS)
    factor[other] = 0.5
    found.promised = lambda now: Move(other, 0.5) if now != other else None
    found.tuner.speeds_changed()
    while found.now != other or found.tuner._trial is not None:
        found.run(1)
    assert resting != other
    looks = len(found.looks)
    found.tuner.speeds_changed()
    assert len(found.run(2).looks) == looks + 1


@pytest.mark.parametrize("seed", range(8))
def test_noise_alone_makes_few_changes(seed: int) -> None:
    """±20 % on every step, and a model that goes on promising what is not there: each change costs 50 steps of rest."""
    chance = random.Random(seed)
    found = Training(lambda _: chance.uniform(0.8, 1.2), lambda now: Move(FAST if now == SLOW else SLOW, 0.5)).run(2000)
    assert 0 < len(found.moves) <= 2000 / 50


def test_a_model_that_always_has_another_idea_is_made_to_rest() -> None:
    """Nothing that it promises is there, and nothing is promised twice: each change costs 50 steps all the same."""
    ideas, chance = itertools.count(3), random.Random(1)
    found = Training(lambda _: chance.uniform(0.95, 1.05), lambda _: Move(EffectiveKnobs(float(next(ideas)), 0.0), 0.5))
    assert 8 < len(found.run(2000).moves) <= 2000 / REST_STEPS + TURNS + 1


def test_a_small_promise_is_not_worth_a_move() -> None:
    found = Training(lambda _: 1.0, lambda _: Move(FAST, MINIMUM_GAIN * 0.9)).run(300)
    assert found.moves == []
    waits = [later - sooner for sooner, later in itertools.pairwise([0, *found.looks])]
    assert waits == [6, 12, 24, 48, 64, 64, 64], "each time it waits for twice as long, up to 64 steps"
    assert (FIRST_SEARCH_STEPS, LONGEST_WAIT_STEPS) == (6, 64)


@pytest.mark.parametrize("steps_before", [40, 400])
def test_it_follows_what_slowed_down(steps_before: int) -> None:
    """Bandwidth halves, the model knows: it need not wait for its next look, and nothing counts as refuted."""
    slowed = False
    found = Training(
        lambda knobs: (3.0 if slowed else 0.5) if knobs == FAST else 1.0,
        lambda now: (Move(SLOW, 0.6) if now == FAST else None) if slowed else promise_fast(now),
    ).run(steps_before)
    slowed = True
    found.run(PERSISTENT_STEPS + 1)
    assert found.now == SLOW
    assert len(found.run(200).moves) == 2


def test_a_refuted_cache_is_not_tried_again_a_page_larger() -> None:
    """Free host memory differs at every look, and so do the bytes that the model would cache."""
    sizes = itertools.count(1 << 30, 4096)
    found = Training(
        lambda knobs: 1.2 if knobs.host_cache_bytes else 1.0,
        lambda now: Move(replace(now, host_cache_bytes=next(sizes)), 0.5),
    ).run(REFUTED_STEPS)
    assert len(found.moves) == 2, "there and back"
    assert len(found.looks) > 2
    found.promised = promise_fast
    assert len(found.run(LONGEST_WAIT_STEPS).moves) > 2, "another move is another matter"


def test_what_was_refuted_is_tried_again_once_speeds_have_changed() -> None:
    times = {SLOW: 1.0, FAST: 1.2}
    found = Training(times.__getitem__, promise_fast).run(40)
    assert found.moves[-1] == (FIRST_SEARCH_STEPS + TURN, "off")
    times.update({SLOW: 3.0})
    assert found.run(PERSISTENT_STEPS + 1).now == FAST
    assert found.run(100).now == FAST


@pytest.mark.parametrize(
    ("fast", "steps_later", "looks_at_once"),
    [(0.6, 2 * TURN, True), (0.99, 2 * TURN, False), (0.99, OWN_STEPS, True)],
)
def test_a_rate_that_changes_makes_it_look_unless_it_rests(fast: float, steps_later: int, looks_at_once: bool) -> None:
    """After a comparison without a clear gain, rates may have changed because of it: later they mean something."""
    noise = itertools.cycle([0.97, 1.0, 1.03])
    found = Training(lambda knobs: next(noise) * (1.0 if knobs == SLOW else fast), promise_fast)
    while not found.tuner.last_verdict:
        found.run(1)
    found.run(steps_later)
    looks = len(found.looks)
    found.tuner.speeds_changed()
    assert len(found.run(2).looks) == looks + looks_at_once


def test_rates_that_drift_all_the_time_are_looked_at_less_and_less() -> None:
    """Updates take as long as before, and nothing better is found: each look doubles the wait for the next one."""
    slowed = False
    found = Training(lambda _: 2.0 if slowed else 1.0, lambda _: None, look_seconds=0.04)

    def drift(steps: int) -> list[int]:
        before = len(found.looks)
        for _ in range(steps):
            found.run(1)
            found.tuner.speeds_changed()
        return found.looks[before:]

    looks = drift(900)
    waits = [later - sooner for sooner, later in itertools.pairwise(looks)]
    assert waits == [2 * OWN_STEPS + 1, 4 * OWN_STEPS + 1, *[LONGEST_URGENT_WAIT_STEPS + 1] * 2]
    slowed = True
    assert drift(PERSISTENT_STEPS + 2), "an update that takes longer is looked at at once"


def test_a_probe_is_followed_by_a_look() -> None:
    """Nobody knows what the probe will do: it stays if it is better, and a look with what it showed comes at once."""
    best = EffectiveKnobs(3.0, 0.0)
    times = {SLOW: 1.0, FAST: 0.8, best: 0.7}

    def promised(now: EffectiveKnobs) -> Move | None:
        return {SLOW: Move(FAST, None), FAST: Move(best, 0.12), best: None}[now]

    found = Training(times.__getitem__, promised).run(20)
    assert found.moves == [(FIRST_SEARCH_STEPS, 2.0), (FIRST_SEARCH_STEPS + TURN + 1, 3.0)]
    assert found.now == best
    assert "a probe" not in found.tuner.last_verdict

    times[FAST] = 1.2
    found = Training(times.__getitem__, lambda now: Move(FAST, None) if now == SLOW else None).run(400)
    assert found.now == SLOW
    assert len(found.moves) == 2, "one probe, and no second one while speeds stay"


def test_an_operator_ends_a_comparison() -> None:
    found = Training(lambda _: 1.0, promise_fast).run(FIRST_SEARCH_STEPS + 1)
    assert found.now == FAST
    found.now = replace(FAST, static_ratio=0.5)
    found.run(2 * TURN)
    assert found.now == replace(FAST, static_ratio=0.5)
    assert len(found.moves) == 1
    assert len(found.run(LONGEST_WAIT_STEPS).looks) > 1, "it goes on from there"


def test_what_cannot_be_had_is_not_tried_again() -> None:
    training = Training(lambda _: 1.0, promise_fast).run(FIRST_SEARCH_STEPS)
    assert training.tuner.refuse("host memory is full") == SLOW, "to go back to"
    assert training.tuner.refuse("again") is None
    training.now = SLOW
    training.run(300)
    assert len(training.moves) == 1
    assert training.tuner.last_verdict == "Not tried: host memory is full"


def test_a_look_that_costs_much_is_rare() -> None:
    found = Training(lambda _: 1.0, lambda _: None, look_seconds=SAVED_SECONDS, step_seconds=0.2).run(5600)
    looks = len(found.looks)
    assert looks == 1 + int(5600 * 0.2 * SEARCH_SHARE / SAVED_SECONDS), "of 1,120 s it may take 0.11"
    found.seconds, found.step_seconds = lambda _: 2.0, 0.0
    assert len(found.run(PERSISTENT_STEPS + 1).looks) == looks + 1, "after a drift it does not wait"
    found.step_seconds, found.speeds_change = 0.1, True
    assert len(found.run(4 * OWN_STEPS).looks) == looks + 1, "where speeds change in every step, it waits, too"
    found.look_seconds = 1e-3
    found.clock += 1000.0  # what the last one cost is paid
    looked = len(found.run(4 * OWN_STEPS).looks) - looks - 1
    assert 2 <= looked <= 4, "and one that is cheap comes more often"


def test_a_second_change_soon_after_the_first_is_not_forgotten() -> None:
    """Looks are dear, and the one after the first change is just over: what the second brought is looked at soon."""
    found = Training(lambda _: 1.0, lambda _: None, look_seconds=0.005, step_seconds=0.2).run(300)
    found.seconds = lambda _: 2.0
    slow_from, fast_from = 301, found.run(PERSISTENT_STEPS + 4).step + 1
    found.seconds = lambda _: 1.0
    found.run(3 * OWN_STEPS)
    first, second = (next(one for one in found.looks if one >= after) for after in (slow_from, fast_from))
    assert first < fast_from
    assert second <= first + OWN_STEPS + 1, "else it waits for 0.01 % of the time, which is 50 s here"
