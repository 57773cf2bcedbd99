"""Lines and sentences of a knob preview: predictions before and after the change, with measurements. Pure: it draws
nothing and sends no requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from tidegate import units
from tidegate.client.step_stats import WINDOW
from tidegate.timeline.timeline import PHASES
from tidegate.wire.knobs import MeasuredEffect
from tidegate.wire.prediction import KnobPreview, PredictedUpdate
from tidegate.wire.step import StepReport

NOTABLE: Final = 0.005
"""Smallest relative change of a predicted value that is shown. A smaller change counts as no change."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One figure: measured, predicted for the present knobs, and predicted for the changed knobs. None: unknown."""

    name: str
    measured: float | None
    now: float | None
    then: float | None
    show: Callable[[float | None], str]
    part: bool = False
    """Whether the figure is a part of the total in a line above, so that its name is shown indented."""

    @property
    def change(self) -> float | None:
        """Relative change of the prediction, 0 below `NOTABLE`; None if there is no prediction."""
        if self.now is None or self.then is None or self.now <= 0:
            return None
        share = (self.then - self.now) / self.now
        return share if abs(share) >= NOTABLE else 0.0


def lines(preview: KnobPreview, steps: Sequence[StepReport]) -> list[Line]:
    """Lines for step, update, stalls by cause, lower bound, memory and traffic; empty without a prediction."""
    now, then = preview.predicted_before, preview.predicted_after
    if now is None or then is None:
        return []
    recent = [step for step in list(steps)[-WINDOW:] if not step.skipped]
    others = sum(value for phase, value in preview.predicted_phase_seconds_after.items() if phase != "update")
    waits = {cause: _median(recent, _waits(cause)) for cause in _causes(now, then)}
    last = recent[-1] if recent else None
    return [
        _seconds("step", _median(recent, _step), others + now.update_seconds, others + then.update_seconds),
        _seconds("update", _median(recent, _update), now.update_seconds, then.update_seconds, part=True),
        _seconds("stalled", _median(recent, _stalled), sum(now.stalls.values()), sum(then.stalls.values())),
        *(
            _seconds(c, waits[c], now.stalls.get(c, 0.0), then.stalls.get(c, 0.0), part=True)
            for c in waits
        ),
        _seconds(f"at best ({then.bound_by})", None, now.bound_seconds, then.bound_seconds),
        *_bytes("host memory", last.host_memory_bytes if last else {}, now.host_memory_bytes, then.host_memory_bytes),
        Line(name="device memory of the engine", measured=None, now=now.device_memory_bytes,
             then=then.device_memory_bytes, show=units.nbytes),
        *_bytes("moved a step", {}, now.lane_bytes, then.lane_bytes),
    ]  # fmt: skip


def against(effect: MeasuredEffect, predicted: tuple[float, float] | None) -> str:
    """The measured update times before and after a change of knobs, as text; with the predicted times if `predicted`
    (seconds before, seconds after) is given."""
    before, after = effect.update_seconds_before, effect.update_seconds_after
    measured = f"update {units.seconds(before)} → {units.seconds(after)}{_percent(before, after)}"
    measured += f", {effect.difference}" if effect.difference else ""
    counted = f"{effect.steps_after} steps after, {effect.steps_before} before"
    if predicted is None:
        return f"measured: {measured}; {counted}"
    was, now = predicted
    return (
        f"measured: {measured}; predicted: {units.seconds(was)} → {units.seconds(now)}{_percent(was, now)}; {counted}"
    )


def headline(preview: KnobPreview) -> str:
    """The prediction in one or two sentences, or the reason why there is none."""
    before, after = preview.predicted_update_seconds_before, preview.predicted_update_seconds_after
    if before is None or after is None:
        return " ".join(
            text for text in (preview.no_prediction or "No prediction.", preview.no_room, *preview.notes) if text
        )
    text = f"Predicted update: {units.seconds(before)} → {units.seconds(after)}{_percent(before, after)}."
    if preview.error_ratio is not None:
        text += f" Predictions of this run are off by {units.share(preview.error_ratio)} now."
    then = preview.predicted_after
    if then is not None and then.low_seconds is not None and then.high_seconds is not None:
        text += f" 9 of 10 updates between {units.seconds(then.low_seconds)} and {units.seconds(then.high_seconds)}."
    return " ".join(part for part in (text, preview.no_room, *preview.notes) if part)


def _percent(before: float, after: float) -> str:
    return f" ({units.change((after - before) / before)})" if before > 0 else ""


def _seconds(name: str, measured: float | None, now: float, then: float, *, part: bool = False) -> Line:
    return Line(name=name, measured=measured, now=now, then=then, show=units.seconds, part=part)


def _bytes(name: str, measured: Mapping[str, int], now: Mapping[str, int], then: Mapping[str, int]) -> list[Line]:
    """A line with the total bytes, and after it a line for each key (kind of memory, or lane) whose bytes change.

    name: name of the total. measured, now, then: bytes by key, measured and as predicted for the present knobs (`now`)
    and for the changed knobs (`then`).
    """
    kinds = dict.fromkeys([*now, *then])
    total = Line(
        name=name, measured=sum(measured.values()) if measured else None, now=sum(now.values()),
        then=sum(then.values()), show=units.nbytes,
    )  # fmt: skip
    parts = [
        Line(name=kind, measured=measured.get(kind), now=now.get(kind, 0), then=then.get(kind, 0), show=units.nbytes,
             part=True)
        for kind in kinds
    ]  # fmt: skip
    return [total, *(line for line in parts if line.change != 0 and (line.now or line.then))]


def _causes(now: PredictedUpdate, then: PredictedUpdate) -> list[str]:
    found = dict.fromkeys([*now.stalls, *then.stalls])
    worst = {cause: max(now.stalls.get(cause, 0.0), then.stalls.get(cause, 0.0)) for cause in found}
    return sorted((cause for cause in found if worst[cause] > 0), key=lambda cause: -worst[cause])


def _step(step: StepReport) -> float:
    return sum(step.phase_seconds.get(phase, 0.0) for phase in PHASES)


def _update(step: StepReport) -> float:
    return step.phase_seconds.get("update", 0.0) + step.spill_seconds


def _stalled(step: StepReport) -> float:
    return sum(row.seconds for row in step.stalls if row.phase == "update")


def _waits(cause: str) -> Callable[[StepReport], float]:
    return lambda step: sum(row.seconds for row in step.stalls if row.phase == "update" and row.cause == cause)


def _median(steps: Sequence[StepReport], pick: Callable[[StepReport], float]) -> float | None:
    return median(map(pick, steps)) if steps else None
