"""Errors of predictions, and the cost of choosing the configuration with the best prediction."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from predicting.choices import Choice


@dataclass(frozen=True, kw_only=True)
class Row:
    """The update times of one configuration, in seconds: the typical measured time (`measured`) and the quartiles of
    the measured times (`low`, `high`); the prediction of the model (`predicted`), and of the papers' equations
    (`equation`)."""

    choice: Choice
    measured: float
    low: float
    high: float
    predicted: float
    equation: float
    bottleneck: str
    """The resource that was busy for longest."""
    emulated: bool
    """Whether the bottleneck is an emulated lane, which is paced."""
    spills: bool = False
    """Whether gradients are spilled: copied to host memory, and back with the state of their subgroup."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def summary(rows: Sequence[Row]) -> dict[str, float | int | None]:
    """Statistics of the errors, relative to the measured times. `pick_regret`: how much longer the update takes in the
    configuration with the best prediction than in the fastest one, as a share."""
    if len(rows) < 2:
        return {"rows": len(rows), "median_abs_error": None, "p95_abs_error": None, "pick_regret": None}
    mean = statistics.fmean(row.measured for row in rows)
    return {
        "rows": len(rows),
        **_errors("", [abs(row.error) for row in rows]),
        "median_error": round(statistics.median(row.error for row in rows), 4),
        "pick_regret": round(regret(rows), 4),
        **_errors("mean_", [abs(mean / row.measured - 1) for row in rows]),
        **_errors("equation_", [abs(row.equation / row.measured - 1) for row in rows]),
        "equation_pick_regret": round(regret(rows, by_equation=True), 4),
    }


def picked(rows: Sequence[Row], *, by_equation: bool = False) -> Row:
    """The row with the shortest predicted update; by the papers' equations if `by_equation`."""
    return min(rows, key=lambda row: row.equation if by_equation else row.predicted)


def regret(rows: Sequence[Row], *, by_equation: bool = False) -> float:
    best = min(row.measured for row in rows)
    return picked(rows, by_equation=by_equation).measured / best - 1


def _errors(prefix: str, errors: Sequence[float]) -> dict[str, float]:
    return {
        f"{prefix}median_abs_error": round(statistics.median(errors), 4),
        f"{prefix}p95_abs_error": round(statistics.quantiles(errors, n=20, method="inclusive")[-1], 4),
    }
