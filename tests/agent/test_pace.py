"""What a plan may count on: that the step does not come sooner than it did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.agent.engine.pace import SHORTEST_SECONDS, Pace

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
    pace = Pace()
    for one in seen:
        pace.observe(one)
    assert pace.step_at == expected


@given(st.lists(seconds, min_size=1))
def test_never_more_than_the_last_step_and_seldom_much_less(seen: list[float]) -> None:
    pace = Pace()
    for one in seen:
        pace.observe(one)
        assert pace.step_at <= one
        assert one < max(4 * pace.step_at, SHORTEST_SECONDS)


@given(st.floats(2 * SHORTEST_SECONDS, 1e4), st.lists(st.floats(1, 1.9)))
def test_steps_that_differ_by_less_than_half_settle_on_one_plan(shortest: float, factors: list[float]) -> None:
    pace = Pace()
    pace.observe(shortest)
    settled = pace.step_at
    for factor in factors:
        pace.observe(shortest * factor)
        assert pace.step_at == settled
