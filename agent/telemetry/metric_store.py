"""In-memory metric store of a rank: all series that /metrics shows, by family and label values."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tidegate.metrics.catalogue import METRICS

Labels = tuple[str, ...]
"""Label values, in the order of the labels in the catalogue."""

_BUCKETS: Final = {metric.name: metric.buckets for metric in METRICS if metric.type == "histogram"}


@dataclass(frozen=True, slots=True)
class Exemplar:
    """Newest observation of a bucket, with its step. `timestamp`: seconds since the epoch."""

    step: int
    value: float
    timestamp: float


@dataclass
class Histogram:
    """Histogram of one series. `counts[i]` counts observations above `bounds[i - 1]` and up to `bounds[i]`, the last
    count those above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    exemplars: dict[int, Exemplar] = field(default_factory=dict)
    """Newest observation by index of the bucket."""
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, exemplar: Exemplar | None = None) -> None:
        """Adds one observation."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if exemplar is not None:
            self.exemplars[bucket] = exemplar


class MetricStore:
    """Series of all metrics, with one method for each way to update them. Families are named as in the catalogue;
    KeyError for another name.

    Not thread-safe: callers that share it must lock it.
    """

    def __init__(self) -> None:
        self._rows: dict[str, dict[Labels, float]] = {m.name: {} for m in METRICS if m.type != "histogram"}
        self._histograms: dict[str, dict[Labels, Histogram]] = {name: {} for name in _BUCKETS}
        self._with_pending: dict[str, dict[Labels, float]] = {}

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Adds to a counter that is counted in this store."""
        rows = self._rows[name]
        rows[labels] = rows.get(labels, 0) + amount

    def set_series(self, name: str, rows: Mapping[Labels, float]) -> None:
        """Sets all series of a gauge, or of a counter that is counted elsewhere, to their present values."""
        series = self._rows[name]
        series.clear()
        series.update(rows)

    def set_value(self, name: str, value: float | None) -> None:
        """Sets a gauge or an external counter without labels; None removes its value."""
        self.set_series(name, {} if value is None else {(): value})

    def observe(self, name: str, value: float, *labels: str, step: int | None = None, timestamp: float = 0.0) -> None:
        """Adds one observation to a histogram, with the number of its step."""
        series = self._histograms[name]
        if labels not in series:
            series[labels] = Histogram(_BUCKETS[name])
        series[labels].observe(value, None if step is None else Exemplar(step, value, timestamp or time.time()))

    def set_pending(self, name: str, rows: Mapping[Labels, float]) -> None:
        """Sets the amounts by which a counter is ahead of its total: work in progress that `add` will count when it has
        ended.

        A shown value never decreases, neither when `add` counts the pending amounts, nor when they turn out a little
        smaller.
        """
        totals, shown = self._rows[name], self._with_pending.setdefault(name, {})
        for labels in totals.keys() | rows.keys():
            value = totals.get(labels, 0) + rows.get(labels, 0)
            shown[labels] = max(shown.get(labels, 0), value)

    def rows(self, name: str) -> Mapping[Labels, float]:
        """Series of a counter or gauge, without pending amounts."""
        return self._rows[name]

    def rows_with_pending(self, name: str) -> Mapping[Labels, float]:
        """Series of a counter or gauge, including pending amounts."""
        return self._with_pending.get(name) or self._rows[name]

    def histograms(self, name: str) -> Mapping[Labels, Histogram]:
        """Series of a histogram."""
        return self._histograms[name]
