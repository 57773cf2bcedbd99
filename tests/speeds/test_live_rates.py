"""Live rates: odd steps do not move them, a speed that has changed does, soon."""

from __future__ import annotations

import random

import pytest

from tidegate.speeds.live_rates import PERSISTENT_STEPS, TYPICAL_STEPS, WINDOW_STEPS, LiveRates, drifted
from tidegate.speeds.rate_card import MeasuredWork, RateCard


def copied(seconds: float, nbytes: int = 1000) -> MeasuredWork:
    return {"h2d_bytes_per_second": (nbytes, seconds)}


def h2d(live: LiveRates) -> float:
    assert live.card is not None
    assert live.card.h2d_bytes_per_second is not None
    return live.card.h2d_bytes_per_second


def test_a_third_of_odd_steps_does_not_move_a_rate() -> None:
    live, chance = LiveRates(), random.Random(0)
    for step in range(100):
        live.observe(copied(chance.choice([5.0, 20.0]) if step % 3 == 0 else 1.0))
    assert h2d(live) == 1000.0
    assert live.recalibrations == 0


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_speed_that_has_changed_for_good_is_followed(factor: float) -> None:
    live = LiveRates()
    for _ in range(WINDOW_STEPS):
        live.observe(copied(1.0))
    for _ in range(PERSISTENT_STEPS - 1):
        assert live.observe(copied(factor)) == ()
        assert h2d(live) == 1000.0, "it may have been a hiccup"
    assert live.observe(copied(factor)) == ("h2d_bytes_per_second",)
    assert h2d(live) == 1000.0 / factor
    assert live.recalibrations == 1
    for _ in range(WINDOW_STEPS):
        assert live.observe(copied(factor)) == (), "once"


def test_what_was_not_seen_for_long_keeps_its_rate() -> None:
    live = LiveRates()
    assert live.card is None
    live.observe({**copied(1.0), "device_params_per_second": (50, 2.0)})
    for _ in range(2 * WINDOW_STEPS):
        live.observe(copied(1.0))
    assert live.card is not None
    assert live.card.device_params_per_second == 25.0
    assert live.card.cpu_params_per_second is None


def test_what_is_known_from_elsewhere_counts_until_it_is_seen() -> None:
    live = LiveRates(RateCard(h2d_bytes_per_second=7.0, cpu_params_per_second=9.0))
    assert h2d(live) == 7.0
    live.observe(copied(1.0))
    assert h2d(live) == 1000.0
    assert live.card is not None
    assert live.card.cpu_params_per_second == 9.0


def test_a_step_that_showed_nothing_leaves_what_ops_are_known_to_cost() -> None:
    known = RateCard(h2d_bytes_per_second=7.0, op_seconds={"h2d": 0.5})
    live = LiveRates(known)
    live.observe({})
    assert live.card == known


def test_amounts_that_differ_count_as_speeds() -> None:
    live = LiveRates()
    for nbytes in (1000, 2000, 500, 4000):
        live.observe(copied(nbytes / 1000, nbytes))
    live.observe({"h2d_bytes_per_second": (0, 0.0)})
    assert h2d(live) == 1000.0


@pytest.mark.parametrize(
    ("before", "last", "expected"),
    [
        ([1.0] * TYPICAL_STEPS, [1.3] * PERSISTENT_STEPS, True),
        ([1.0] * TYPICAL_STEPS, [0.75] * PERSISTENT_STEPS, True),
        ([1.0] * TYPICAL_STEPS, [1.2] * PERSISTENT_STEPS, False),
        ([1.0] * TYPICAL_STEPS, [1.3, 0.7] * (PERSISTENT_STEPS // 2), False),
        ([1.0] * (TYPICAL_STEPS - 1), [9.0] * PERSISTENT_STEPS, False),
    ],
)
def test_drift(before: list[float], last: list[float], expected: bool) -> None:
    assert drifted([*before, *last]) is expected


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_fifth_hardly_ever_looks_like_drift(seed: int) -> None:
    live, chance = LiveRates(), random.Random(seed)
    for _ in range(1000):
        live.observe(copied(chance.uniform(0.8, 1.2)))
    assert live.recalibrations <= 1
    assert h2d(live) == pytest.approx(1000.0, rel=0.1)
