"""Liveness, and what counts as before and after, as tables."""

from __future__ import annotations

import pytest

from tests.daemon.live import step_report
from tidegate.daemon.control.liveness import liveness, of_run
from tidegate.daemon.decisions.knob_effect import measure
from tidegate.daemon.decisions.step_window import StepFigures
from tidegate.wire.base import Liveness
from tidegate.wire.knobs import MeasuredEffect


@pytest.mark.parametrize(
    ("silent", "expected"), [(0.0, "live"), (10.0, "live"), (10.1, "stale"), (30.0, "stale"), (30.1, "lost")]
)
def test_liveness(silent: float, expected: Liveness) -> None:
    assert liveness(silent, 10.0) == expected


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (["live", "live"], "live"),
        (["live", "stale"], "stale"),
        (["lost", "stale", "live"], "lost"),
        (["finished", "live"], "live"),
        (["finished", "finished"], "finished"),
        ([], "finished"),
    ],
)
def test_of_run(ranks: list[Liveness], expected: Liveness) -> None:
    assert of_run(ranks, None) == expected


def steps(*seconds: float, first: int = 1) -> list[StepFigures]:
    return [StepFigures.of(step_report(first + i, value)) for i, value in enumerate(seconds)]


SLOW, FAST = [2.0] * 6, [1.0] * 6


@pytest.mark.parametrize(
    ("history", "applied", "expected"),
    [
        (steps(*SLOW, *FAST), {0: 1, 1: 7}, (6, 6, 2.0, 1.0, -0.5, "faster")),
        (steps(*SLOW, *FAST[:4]), {0: 1, 1: 7}, None),
        (steps(*SLOW), {0: 1}, None),
        (steps(*FAST), {1: 1}, None),
        (steps(9.0, *SLOW, *FAST), {0: 2, 1: 8}, (6, 6, 2.0, 1.0, -0.5, "faster")),
        (steps(*[9.0] * 30, *SLOW, *FAST), {0: 1, 1: 37}, (20, 6, 9.0, 1.0, -8 / 9, "faster")),
        (steps(*SLOW, *[1.0] * 40), {0: 1, 1: 7}, (6, 20, 2.0, 1.0, -0.5, "faster")),
    ],
    ids=["both", "too few", "start", "nothing before", "an older generation", "at most 20", "at most 20 after"],
)
def test_measure(
    history: list[StepFigures], applied: dict[int, int], expected: tuple[int, int, float, float, float, str] | None
) -> None:
    found = measure(history, applied, 1)
    assert (None if found is None else tuple(found.model_dump().values())) == expected


def test_what_may_be_chance_is_no_clear_difference() -> None:
    found = measure(steps(*[1.0, 1.2] * 10, *[1.2, 1.0] * 10), {0: 1, 1: 21}, 1)
    assert found is not None
    assert (found.update_shift, found.difference) == (pytest.approx(0), "no clear difference")


def test_skipped_steps_do_not_count() -> None:
    history = steps(*SLOW, *FAST)
    history[8] = history[8]._replace(skipped=True, update_seconds=0.0)
    found = measure(history, {0: 1, 1: 7}, 1)
    assert found is not None
    assert found.steps_after == 5


def test_an_effect_that_the_version_before_stored_is_read() -> None:
    stored = {"steps_before": 20, "steps_after": 20, "update_seconds_before": 2.0, "update_seconds_after": 1.0}
    found = MeasuredEffect.model_validate(stored)
    assert (found.update_seconds_after, found.update_shift, found.difference) == (1.0, None, None)
