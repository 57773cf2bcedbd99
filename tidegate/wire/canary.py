"""Messages about canaries (changes of knobs on trial), their measured effect, and rollbacks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidegate.wire.base import Count, Finite, Message, Seconds, Text

CanaryState = Literal["waiting", "promoted", "condemned", "rolled_back", "superseded"]
"""State of a canary.

waiting: no verdict yet. promoted: the change is kept. condemned: the change is harmful, and the ranks are being asked
to restore the earlier knobs. rolled_back: the earlier knobs are restored. superseded: another generation was committed
before the trial ended.
"""
MAX_CANARY_STEPS = 200


class CanaryRequest(Message):
    """Request for a canary: the change is kept only if `steps` steps with it are not worse than the steps before."""

    steps: Annotated[int, Field(strict=True, ge=5, le=MAX_CANARY_STEPS)] = 20
    min_effect: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.05
    """Smallest slowdown or speedup that counts as an effect of the change, as a share of the step time."""
    min_headroom: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.05
    """Share of the device's memory that must stay free; with less, the change is rolled back. Not checked if less was
    free before the change already."""


class CanaryMeasure(Message):
    """Comparison of the steps before and after a change. Times are medians; each step counts with its slowest rank.

    A step is forward, backward and update. Exposed time is the time for which training waited for Tidegate; if ranks
    do not report it, it is the update time. Shifts are Hodges-Lehmann estimates of the slowdown, as shares of the
    median step before. Scores are standard scores of the Mann-Whitney test; chance alone exceeds 2.33 in one of a
    hundred tests. Positive values mean slower.
    """

    steps_before: Count
    steps_after: Count
    step_seconds_before: Seconds
    step_seconds_after: Seconds
    exposed_seconds_before: Seconds
    exposed_seconds_after: Seconds
    update_seconds_before: Seconds
    update_seconds_after: Seconds
    step_shift: Finite
    step_score: Finite
    exposed_shift: Finite
    exposed_score: Finite
    headroom: Finite | None = None
    """Smallest share of the device's memory that was free in the steps after the change; None if the ranks did not
    report the size of this memory."""


class CanaryView(Message):
    """The canary of one generation, compared with `base`, the generation whose knobs a rollback restores."""

    base: Count
    steps: Count
    min_effect: float
    min_headroom: float
    state: CanaryState
    verdict: Text = ""
    predicted_update_seconds_before: Seconds | None = None
    predicted_update_seconds_after: Seconds | None = None
    measured: CanaryMeasure | None = None


class Rollback(Message):
    """Body of `POST /v1/runs/{run}/rollback`."""

    to: Count | None = None
    """Number of the generation whose knobs are restored. None: if a canary is running, the generation before it;
    otherwise the newest one that was committed before the present generation."""
    reason: Text = ""
