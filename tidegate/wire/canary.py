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
    """Smallest change of the step time that counts, as a share of the step time."""
    min_headroom: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.05
    """Share of the device's memory that must stay free; not required if it was not free before the change."""


class CanaryMeasure(Message):
    """Medians over the steps on each side, on the slowest rank of each step.

    A step is forward, backward and update; exposed is the time for which training waited for Tidegate (the update, if
    ranks do not report it). Shifts are Hodges-Lehmann estimates, as shares of the median step before; scores are
    standard normal scores of the Mann-Whitney test: 2.33 happens by chance in one of a hundred tests. Positive means
    slower.
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
    """Smallest share of device memory that was free; None if the ranks did not report its size."""


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
    """The generation whose knobs to restore; None: the generation before, or the base of a running canary."""
    reason: Text = ""
