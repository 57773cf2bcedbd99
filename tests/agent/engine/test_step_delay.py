"""What a plan may count on: that the step does not come sooner than it did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.agent.engine.planning_inputs import SPEED_CHANGE_FACTOR, StablePathSpeeds, StepDelay
from tidegate.plan.path_times import SHORTEST_SECONDS
from tidegate.plan.tier_split import PathSpeeds

seconds = st.floats(0, 1e4)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([], 0),
        ([0.0], 0),
        ([SHORTEST_SECONDS / 2], 0),
        ([0.3], 0.25),
        ([0.3, 0.25, 0.99], 0.25),
        ([0.3, 1.0], 1),
        ([0.3, 0.24], 0.125),
        ([3.0, 0.0], 0),
    ],
)
def test_what_is_counted_on(seen: list[float], expected: float) -> None:
    pace = StepDelay()
    for one in seen:
        pace.observe(one)
    assert pace.step_at == expected


@given(st.lists(seconds, min_size=1))
def test_never_more_than_the_last_step_and_seldom_much_less(seen: list[float]) -> None:
    pace = StepDelay()
    for one in seen:
        pace.observe(one)
        assert pace.step_at <= one
        assert one < max(4 * pace.step_at, SHORTEST_SECONDS)


@given(st.floats(2 * SHORTEST_SECONDS, 1e4), st.lists(st.floats(1, 1.9)))
def test_steps_that_differ_by_less_than_half_settle_on_one_plan(shortest: float, factors: list[float]) -> None:
    pace = StepDelay()
    pace.observe(shortest)
    settled = pace.step_at
    for factor in factors:
        pace.observe(shortest * factor)
        assert pace.step_at == settled


@pytest.mark.parametrize(("factors", "kept"), [([1.1, 0.9, 1.2, 0.85], True), ([1.3], False), ([0.75], False)])
def test_a_path_keeps_its_speed_until_it_has_another(factors: list[float], kept: bool) -> None:
    """Back and forth around any speed is no other speed: each would be another plan."""

    def speeds(factor: float) -> PathSpeeds:
        return PathSpeeds(read_bytes_per_second=1e9 * factor, write_bytes_per_second=1e9 * factor)

    pace = StablePathSpeeds()
    pace.observe({"disk": speeds(1.0), "other": speeds(1.0)})
    for factor in factors:
        pace.observe({"disk": speeds(factor), "other": speeds(1.0)})
    assert pace.speeds == {"disk": speeds(1.0 if kept else factors[-1]), "other": speeds(1.0)}


@given(st.lists(st.floats(1e3, 1e12), min_size=1))
def test_what_plans_go_by_is_never_far_off(rates: list[float]) -> None:
    pace = StablePathSpeeds()
    for rate in rates:
        live = PathSpeeds(read_bytes_per_second=rate, write_bytes_per_second=rate)
        pace.observe({"disk": live})
        assert (
            1 / SPEED_CHANGE_FACTOR
            <= pace.speeds["disk"].seconds_per_byte / live.seconds_per_byte
            <= SPEED_CHANGE_FACTOR
        )
