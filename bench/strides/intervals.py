"""Medians with bootstrap confidence intervals (95 %): of measured values, and of the ratios of two series."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 4000


def interval(values: Sequence[float]) -> dict[str, float]:
    """The median, and its bootstrap interval (95 %)."""
    found = np.asarray(values)
    chance = np.random.default_rng(0)
    medians = np.median(chance.choice(found, (RESAMPLES, len(found))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return {"median": round(float(np.median(found)), 5), "low": round(float(low), 5), "high": round(float(high), 5)}


def ratio(of: Sequence[float], by: Sequence[float]) -> dict[str, float]:
    """Median of the ratios `of` / `by`, and its bootstrap interval (95 %). There is one ratio for each round, because
    within a round both values were measured under the same load of the machine."""
    return interval([one / other for one, other in zip(of, by, strict=True)])
