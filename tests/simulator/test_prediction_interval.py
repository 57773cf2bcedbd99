"""How far a prediction may be off, from how far others were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.simulator.prediction_interval import MINIMUM_STEPS, PredictionInterval, prediction_interval

ratios = st.lists(st.floats(0.1, 10), min_size=MINIMUM_STEPS, max_size=40)


@given(ratios, st.floats(1e-6, 1e3))
def test_it_holds_the_prediction_and_nothing_that_was_never_seen(seen: list[float], predicted: float) -> None:
    found = prediction_interval(predicted, seen)
    assert found is not None
    assert found.low <= predicted <= found.high
    assert found.low >= predicted * min(1.0, *seen) * (1 - 1e-9)
    assert found.high <= predicted * max(1.0, *seen) * (1 + 1e-9)


def test_nine_of_ten_lie_in_it() -> None:
    assert prediction_interval(2.0, [1 + i / 100 for i in range(101)]) == pytest.approx(
        PredictionInterval(2.0, 2 * 1.95)
    )
    assert prediction_interval(2.0, [0.5 + i / 200 for i in range(101)]) == pytest.approx(
        PredictionInterval(2 * 0.525, 2.0)
    )


def test_a_model_that_is_always_too_low_is_expected_to_be_so() -> None:
    assert prediction_interval(1.0, [1.1] * 8) == pytest.approx(PredictionInterval(1.0, 1.1))


def test_too_few_steps_tell_nothing() -> None:
    assert prediction_interval(1.0, [1.0] * (MINIMUM_STEPS - 1)) is None
