"""What a change of knobs did to the update, measured from the steps around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Final

from tidegate.daemon.decisions.step_window import Figures
from tidegate.wire.knobs import MeasuredEffect

WINDOW_STEPS: Final = 20
MIN_STEPS_AFTER: Final = 5


def measure(steps: Iterable[Figures], applied: Mapping[int, int], generation: int) -> MeasuredEffect | None:
    """Median update seconds of up to 20 steps on each side; None before 5 steps ran with `generation`.

    applied: the first step that ran with each generation. Steps of the generation before the last are left out.
    """
    if generation not in applied:
        return None
    first = applied[generation]
    begin = max((step for number, step in applied.items() if number < generation), default=0)
    end = min((step for number, step in applied.items() if number > generation), default=2**63)
    seconds = [(s.step, s.update_seconds) for s in steps if s.update_seconds is not None and not s.skipped]
    before = [value for step, value in seconds if begin <= step < first][-WINDOW_STEPS:]
    after = [value for step, value in seconds if first <= step < end][:WINDOW_STEPS]
    if not before or len(after) < MIN_STEPS_AFTER:
        return None
    return MeasuredEffect(
        steps_before=len(before),
        steps_after=len(after),
        update_seconds_before=median(before),
        update_seconds_after=median(after),
    )
