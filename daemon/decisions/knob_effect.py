"""Effect of a knob change: the update time measured in the steps before and after the change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from tidegate.comparison import compare
from tidegate.daemon.decisions.step_window import StepFigures
from tidegate.wire.knobs import MeasuredEffect

WINDOW_STEPS: Final = 20
MIN_STEPS_AFTER: Final = 5


def measure(steps: Iterable[StepFigures], applied: Mapping[int, int], generation: int) -> MeasuredEffect | None:
    """Compares the update seconds of up to 20 steps before and 20 steps after the change to `generation`.

    None if no step is known from before the change, or fewer than 5 steps have run with `generation`. applied: the
    number of the first step with each generation, by generation. Only steps of `generation` and of the generation
    directly before it are compared.
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
    found = compare(before, after)
    return MeasuredEffect(
        steps_before=len(before),
        steps_after=len(after),
        update_seconds_before=found.median_before,
        update_seconds_after=found.median_after,
        update_shift=found.shift_share,
        difference=found.difference(),
    )
