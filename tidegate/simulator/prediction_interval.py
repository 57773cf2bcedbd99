"""Prediction interval: the likely error of a prediction, derived from the errors of earlier predictions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

MINIMUM_STEPS: Final = 5
"""Fewest measured steps for which an interval is computed."""


class PredictionInterval(NamedTuple):
    """A 90 % prediction interval of the update's time, in seconds: 9 of 10 measured steps were in it."""

    low: float
    high: float


def prediction_interval(predicted_seconds: float, ratios: Sequence[float]) -> PredictionInterval | None:
    """The prediction interval around `predicted_seconds`; None if fewer than MINIMUM_STEPS ratios are given.

    ratios: measured seconds divided by predicted seconds, of earlier steps. A model whose predictions were 10 % too low
    for this run is expected to be 10 % too low again: the interval reaches from the 5th to the 95th percentile of the
    ratios, and always includes the prediction.
    """
    if len(ratios) < MINIMUM_STEPS:
        return None
    cuts = statistics.quantiles(ratios, n=20, method="inclusive")
    return PredictionInterval(predicted_seconds * min(1.0, cuts[0]), predicted_seconds * max(1.0, cuts[-1]))
