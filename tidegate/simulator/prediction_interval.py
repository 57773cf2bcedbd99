"""How far off a prediction may be, from how far off those of the present knobs were."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

MINIMUM_STEPS: Final = 5
"""Steps without which nothing is known of their spread."""


class Band(NamedTuple):
    """Where an update will most likely be, in seconds: 9 of 10 steps that were measured lay in it."""

    low: float
    high: float


def band(predicted_seconds: float, ratios: Sequence[float]) -> Band | None:
    """Around what is predicted. None after too few steps.

    ratios: seconds measured in steps, by what was predicted of them. A model that has been 10 % too low for this run is
    expected to be so again: the band goes from the 5th to the 95th of 100 ratios, and always holds the prediction.
    """
    if len(ratios) < MINIMUM_STEPS:
        return None
    cuts = statistics.quantiles(ratios, n=20, method="inclusive")
    return Band(predicted_seconds * min(1.0, cuts[0]), predicted_seconds * max(1.0, cuts[-1]))
