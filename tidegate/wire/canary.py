"""Canaries and rollbacks on the wire: a change on trial, what it was measured to do, and the way back."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidegate.wire.base import Count, Finite, Message, Seconds, Text

CanaryState = Literal["waiting", "promoted", "condemned", "rolled_back", "superseded"]
"""waiting: too few steps yet. condemned: it harms, and the ranks are being asked to go back."""
MAX_CANARY_STEPS = 200


class CanaryRequest(Message):
    """Asks that a change be kept only if `steps` steps with it are not worse than those before."""

    steps: Annotated[int, Field(strict=True, ge=5, le=MAX_CANARY_STEPS)] = 20
    min_effect: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.05
    """The least change of the time of a step that counts, as a share of it."""
    min_headroom: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.05
    """Share of the device's memory that must stay free; not asked where it was not free before."""


class CanaryMeasure(Message):
    """Medians over the steps on each side, on the slowest rank of each step.

    A step is forward, backward and update; exposed is what of it training waited for us (the update where ranks do not
    tell). Shifts are Hodges-Lehmann estimates as shares of the median step before; scores are the standard normal ones
    of the Mann-Whitney test, 2.33 is one in a hundred by chance. Positive is slower.
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
    """Least share of device memory that was free; None where the ranks did not tell its size."""


class CanaryView(Message):
    """The trial of one generation against `base`, the generation that it goes back to."""

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
    """The generation whose knobs to bring back; None is the one before, or what a running canary is compared with."""
    reason: Text = ""
