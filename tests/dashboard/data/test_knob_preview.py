"""What a preview says in figures."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dashboard.scripted import step_report
from tidegate.dashboard.data import knob_preview
from tidegate.wire.knobs import MeasuredEffect
from tidegate.wire.prediction import KnobPreview, PredictedUpdate
from tidegate.wire.step import StallRow

STEPS = [
    step_report(number, float(number)).model_copy(
        update={
            "phase_seconds": {"forward": 0.5, "backward": 1.0, "update": update},
            "stalls": (
                StallRow(phase="update", cause="h2d", seconds=0.2),
                StallRow(phase="backward", cause="d2h", seconds=9),
            ),
            "host_memory_bytes": {"state": 12, "mirror": 3},
            "skipped": False,
        }
    )
    for number, update in enumerate((1.0, 2.0, 30.0), start=1)
]


def predicted(seconds: float, **more: Any) -> PredictedUpdate:
    given: dict[str, Any] = {
        "stalls": {"h2d": 0.1}, "lane_bytes": {"h2d": 100, "d2h": 50}, "host_memory_bytes": {"state": 10, "mirror": 4},
        "device_memory_bytes": 7, "bound_seconds": 0.4, "bound_by": "cpu", **more,
    }  # fmt: skip
    return PredictedUpdate(update_seconds=seconds, **given)


def preview(**more: Any) -> KnobPreview:
    now, then = (
        predicted(1.0),
        predicted(0.5, stalls={"h2d": 0.0, "nvme:read": 0.3}, host_memory_bytes={"state": 5, "mirror": 4}),
    )
    given: dict[str, Any] = {
        "predicted_before": now, "predicted_after": then, "predicted_update_seconds_before": 1.0,
        "predicted_update_seconds_after": 0.5, "error_ratio": 0.12,
        "predicted_phase_seconds_after": {"forward": 0.5, "backward": 1.0, "update": 0.5}, **more,
    }  # fmt: skip
    return KnobPreview(run="r", generation=1, before={}, after={}, changed={}, **given)


def test_each_line_has_what_is_measured_and_both_predictions() -> None:
    found = {line.name: (line.measured, line.now, line.then) for line in knob_preview.lines(preview(), STEPS)}
    assert found["step"] == (3.5, 2.5, 2.0)
    assert found["update"] == (2.0, 1.0, 0.5), "medians: one slow step says little"
    assert found["stalled"] == (0.2, 0.1, 0.3), "of the update alone"
    assert found["nvme:read"] == (0.0, 0.0, 0.3)
    assert found["at best (cpu)"] == (None, 0.4, 0.4)
    assert found["host memory"] == (15, 14, 9)
    assert found["state"] == (12, 10, 5)
    assert "mirror" not in found, "kinds that do not change are left out"
    assert found["moved a step"] == (None, 150, 150)


@pytest.mark.parametrize(
    ("now", "then", "change"), [(2.0, 1.0, -0.5), (2.0, 2.005, 0.0), (0.0, 1.0, None), (None, 1.0, None)]
)
def test_a_change_is_a_share_or_none_to_speak_of(now: float | None, then: float, change: float | None) -> None:
    line = knob_preview.Line(name="x", measured=None, now=now, then=then, show=str)
    assert line.change == change


def test_without_a_prediction_there_are_no_lines_and_a_reason() -> None:
    nothing = preview(predicted_before=None, predicted_update_seconds_before=None, no_prediction="No rates yet.")
    assert knob_preview.lines(nothing, STEPS) == []
    assert knob_preview.headline(nothing) == "No rates yet."
    assert knob_preview.lines(preview(), []) != [], "steps may be missing: what is predicted is shown"


def test_a_headline_says_how_far_predictions_are_off() -> None:
    assert knob_preview.headline(preview()) == (
        "Predicted update: 1.00 s → 500 ms (\u221250 %). Predictions of this run are off by 12 % now."
    )


def test_an_effect_is_told_beside_its_prediction() -> None:
    effect = MeasuredEffect(steps_before=20, steps_after=8, update_seconds_before=2.0, update_seconds_after=1.0)
    measured = "measured: update 2.00 s → 1.00 s (\u221250 %)"
    counted = "8 steps after, 20 before"
    assert knob_preview.against(effect, None) == f"{measured}; {counted}"
    clear = effect.model_copy(update={"update_shift": -0.5, "difference": "faster"})
    assert knob_preview.against(clear, None) == f"{measured}, faster; {counted}"
    assert knob_preview.against(effect, (2.0, 0.5)) == f"{measured}; predicted: 2.00 s → 500 ms (\u221275 %); {counted}"
