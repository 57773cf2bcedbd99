"""When the tuner looks and moves, how it compares, what it keeps and what it takes back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from tidegate.knobs import Off
from tidegate.model.tuner import (
    BLOCK_STEPS,
    FIRST_LOOK_STEPS,
    LONGEST_WAIT_STEPS,
    LOOK_SHARE,
    MINIMUM_GAIN,
    REFUTED_STEPS,
    ROUNDS,
    SETTLE_STEPS,
    Move,
    Tuner,
)
from tidegate.plan.effective import Effective

SLOW, FAST = Effective("off", 0.0), Effective(2.0, 0.0)
TURN = SETTLE_STEPS + BLOCK_STEPS


@dataclass
class Training:
    """Steps that take what `seconds` says of their knobs; the model predicts `promised`."""

    seconds: Callable[[Effective], float]
    promised: Callable[[Effective], Move | None]
    tuner: Tuner = field(default_factory=lambda: Tuner(clock=lambda: 0.0))
    now: Effective = SLOW
    step: int = 0
    looks: list[int] = field(default_factory=list)
    moves: list[tuple[int, float | Off]] = field(default_factory=list)

    def run(self, steps: int) -> Training:
        for _ in range(steps):
            self.step += 1
            self.tuner.observe(self.now, self.seconds(self.now))
            wanted = self.tuner.propose(self.now, self.look)
            if wanted is not None:
                self.now = wanted
                self.moves.append((self.step, wanted.stride))
        return self

    def look(self) -> Move | None:
        self.looks.append(self.step)
        return self.promised(self.now)


def promise_fast(now: Effective) -> Move | None:
    return Move(FAST, 0.5) if now == SLOW else None


def test_a_clear_gain_is_kept_after_one_turn() -> None:
    """Within 20 steps of the start it runs what is best, and stays."""
    found = Training(lambda knobs: 1.0 if knobs == SLOW else 0.6, promise_fast).run(300)
    assert found.moves == [(FIRST_LOOK_STEPS, 2.0)]
    assert found.now == FAST
    assert "40.0%" in found.tuner.last_verdict
    assert "kept" in found.tuner.last_verdict


def test_what_is_slower_is_taken_back_after_one_turn_and_not_tried_again_soon() -> None:
    found = Training(lambda knobs: 1.0 if knobs == SLOW else 1.2, promise_fast).run(REFUTED_STEPS)
    assert found.moves == [(FIRST_LOOK_STEPS, 2.0), (FIRST_LOOK_STEPS + TURN, "off")]
    assert "taken back" in found.tuner.last_verdict
    assert len(found.looks) > 2, "it goes on looking"
    assert len(found.run(REFUTED_STEPS).moves) == 4, "things change: it is tried again in the end"


@pytest.mark.parametrize(("fast", "kept"), [(0.96, True), (0.99, False)])
def test_what_is_not_clear_is_compared_by_turns(fast: float, kept: bool) -> None:
    """Noise is larger than the gain: old and new take turns, and medians decide."""
    noise = {SLOW: iter([0.95, 1.0, 1.05] * 100), FAST: iter([0.95, 1.0, 1.05] * 100)}
    found = Training(lambda knobs: next(noise[knobs]) * (1.0 if knobs == SLOW else fast), promise_fast)
    found.run(FIRST_LOOK_STEPS + (2 * ROUNDS - 1) * TURN)
    strides = [stride for _, stride in found.moves]
    assert strides[: 2 * ROUNDS - 1] == [2.0, "off"] * (ROUNDS - 1) + [2.0]
    assert all(b - a == TURN for (a, _), (b, _) in zip(found.moves, found.moves[1:], strict=False))
    assert found.now == (FAST if kept else SLOW)


def test_noise_alone_moves_nothing() -> None:
    """±20 % on every step, and a model that promises what is not there: at most one comparison in 50 steps."""
    chance = random.Random(0)
    found = Training(lambda _: chance.uniform(0.8, 1.2), promise_fast).run(2000)
    turns = [step for step, stride in found.moves if stride == 2.0]
    begun = [step for step, before in zip(turns, [-1000, *turns], strict=False) if step - before > 2 * TURN]
    assert len(begun) <= 2000 / 50
    assert all(b - a >= 50 for a, b in itertools.pairwise(begun))


def test_a_small_promise_is_not_worth_a_move() -> None:
    found = Training(lambda _: 1.0, lambda _: Move(FAST, MINIMUM_GAIN * 0.9)).run(300)
    assert found.moves == []
    assert found.looks == [8, 24, 56, 120, 184, 248], "each time it waits for twice as long, up to 64 steps"
    assert LONGEST_WAIT_STEPS == 64


def test_it_follows_what_slowed_down() -> None:
    """Bandwidth halves, the model knows: it moves at its next look, and the new place is kept."""
    slowed = False
    found = Training(
        lambda knobs: (3.0 if slowed else 0.5) if knobs == FAST else 1.0,
        lambda now: (Move(SLOW, 0.6) if now == FAST else None) if slowed else promise_fast(now),
    ).run(100)
    slowed = True
    found.run(LONGEST_WAIT_STEPS + TURN)
    assert found.now == SLOW
    assert len(found.moves) == 2


def test_an_operator_ends_a_comparison() -> None:
    found = Training(lambda _: 1.0, promise_fast).run(FIRST_LOOK_STEPS + 1)
    assert found.now == FAST
    found.now = replace(FAST, static_ratio=0.5)
    found.run(2 * TURN)
    assert found.now == replace(FAST, static_ratio=0.5)
    assert len(found.moves) == 1


def test_what_cannot_be_had_is_not_tried_again() -> None:
    tuner = Tuner(clock=lambda: 0.0)
    training = Training(lambda _: 1.0, promise_fast, tuner).run(FIRST_LOOK_STEPS)
    tuner.refuse("host memory is full")
    training.now = SLOW
    training.run(300)
    assert len(training.moves) == 1
    assert tuner.last_verdict == "Not tried: host memory is full"


def test_a_look_that_costs_much_is_rare() -> None:
    times = iter(range(10_000))
    now = 0.0

    def clock() -> float:
        return now

    def look() -> Move | None:
        nonlocal now
        now += 1.0
        next(times)
        return None

    tuner = Tuner(clock)
    for _ in range(5000):
        tuner.observe(SLOW, 1.0)
        tuner.propose(SLOW, look)
        now += 0.1
    looks = next(times)
    assert looks == 1 + int(5000 * 0.1 * LOOK_SHARE), "of 500 s it may take half a second"
