"""The verdict on a step: one sentence with the main wait of its update, figures, and what to do."""

from __future__ import annotations

from typing import Final

from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.timeline.remedies import UpdateFigures, remedies_of

SKIPPED: Final = "the step was skipped, because a gradient was not finite: the weights are as they were"
"""Text for a step without an update."""


def verdict(figures: UpdateFigures, knobs: EffectiveKnobs) -> str:
    """The verdict on a step as one sentence without a full stop at its end: its main wait, and what helps with the
    knobs `knobs` in force."""
    return "; ".join([main_wait(figures), *(remedies_of(figures, knobs) if figures.has_update else ())])


def main_wait(figures: UpdateFigures) -> str:
    """The time of the update, and what the update waited for longest, without a full stop at the end."""
    if not figures.has_update:
        return "no update yet"
    share = figures.update_seconds / figures.step_seconds
    whole = f"the update took {figures.update_seconds:.3g} s, {share:.0%} of the step"
    cause, wait = figures.cause
    if not cause:
        return f"{whole}; hardly anything held it up{_computed(figures)}"
    return f"{whole}; it waited {wait / figures.update_seconds:.0%} of it for {cause}{_speed(figures, cause)}"


def _computed(figures: UpdateFigures) -> str:
    total = sum(figures.updated.values())
    return f", and the device updated {figures.updated.get('device', 0) / total:.0%} of the parameters" if total else ""


def _speed(figures: UpdateFigures, lane: str) -> str:
    """The speed of `lane`, with its highest speed if that is known; empty if it copied nothing."""
    nbytes, seconds = figures.lanes.get(lane, (0, 0.0))
    if not nbytes or seconds <= 0:
        return ""
    ceiling = figures.ceilings.get(lane)
    beside = f" of {_gigabytes(ceiling)}" if ceiling else ""
    return f", which moved {_gigabytes(nbytes / seconds)}{beside}"


def _gigabytes(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
