"""In-memory metric store of a rank: all series that /metrics shows, by name of the metric and label values."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tidegate.metrics.catalogue import METRICS

Labels = tuple[str, ...]
"""Label values of a series, in the order in which the catalogue of metrics has the labels."""

_BUCKETS: Final = {metric.name: metric.buckets for metric in METRICS if metric.type == "histogram"}


@dataclass(frozen=True, slots=True)
class Exemplar:
    """Newest observation of a bucket, with its step. `timestamp`: seconds since the epoch."""

    step: int
    value: float
    timestamp: float


@dataclass
class Histogram:
    """Histogram of one series. `counts[i]` is the number of observations above `bounds[i - 1]` and up to `bounds[i]`;
    the last count is that of observations above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    exemplars: dict[int, Exemplar] = field(default_factory=dict)
    """The newest observation of each bucket for which the step is known, by index of the bucket."""
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, exemplar: Exemplar | None = None) -> None:
        """Adds one observation. `exemplar` replaces the exemplar of its bucket; None leaves that as it is."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if exemplar is not None:
            self.exemplars[bucket] = exemplar


class MetricStore:
    """Series of all metrics, with methods to update them. `name` is always the name of a metric in the catalogue;
    KeyError for another name.

    Not thread-safe: callers that share it must lock it.
    """

    def __init__(self) -> None:
        self._rows: dict[str, dict[Labels, float]] = {m.name: {} for m in METRICS if m.type != "histogram"}
        self._histograms: dict[str, dict[Labels, Histogram]] = {name: {} for name in _BUCKETS}
        self._with_pending: dict[str, dict[Labels, float]] = {}

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Adds `amount` to a counter whose total is kept in this store."""
        rows = self._rows[name]
        rows[labels] = rows.get(labels, 0) + amount

    def set_series(self, name: str, rows: Mapping[Labels, float]) -> None:
        """Replaces all series of a gauge, or of a counter whose total is kept elsewhere, by `rows`."""
        series = self._rows[name]
        series.clear()
        series.update(rows)

    def set_value(self, name: str, value: float | None) -> None:
        """Sets a gauge without labels, or a counter without labels whose total is kept elsewhere. None removes the
        value."""
        self.set_series(name, {} if value is None else {(): value})

    def create_histogram(self, name: str, *labels: str) -> None:
        """Creates a series of a histogram, without observations; does nothing if the series exists."""
        series = self._histograms[name]
        if labels not in series:
            series[labels] = Histogram(_BUCKETS[name])

    def observe(self, name: str, value: float, *labels: str, step: int | None = None, timestamp: float = 0.0) -> None:
        """Adds one observation to a histogram. `step`: number of its step, with which it becomes the exemplar of its
        bucket; None for no exemplar. `timestamp`: seconds since the epoch; 0 for now."""
        self.create_histogram(name, *labels)
        exemplar = None if step is None else Exemplar(step, value, timestamp or time.time())
        self._histograms[name][labels].observe(value, exemplar)

    def set_pending(self, name: str, rows: Mapping[Labels, float]) -> None:
        """Sets amounts that are shown in addition to a counter's total: work in progress, which `add` will count when
        it has ended.

        The shown sum never decreases, even if the amount that `add` counts at the end is a little smaller than the
        pending one.
        """
        totals, shown = self._rows[name], self._with_pending.setdefault(name, {})
        for labels in totals.keys() | rows.keys():
            value = totals.get(labels, 0) + rows.get(labels, 0)
            shown[labels] = max(shown.get(labels, 0), value)

    def rows(self, name: str) -> Mapping[Labels, float]:
        """Series of a counter or gauge, without the amounts of `set_pending`."""
        return self._rows[name]

    def rows_with_pending(self, name: str) -> Mapping[Labels, float]:
        """Series of a counter or gauge, including the amounts of `set_pending`."""
        return self._with_pending.get(name) or self._rows[name]

    def histograms(self, name: str) -> Mapping[Labels, Histogram]:
        """Series of a histogram."""
        return self._histograms[name]
