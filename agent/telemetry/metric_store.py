"""All series of a rank, by family and label values: what is recorded here is what /metrics shows."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tidegate.metrics.catalogue import METRICS

Labels = tuple[str, ...]
"""Values, in the order of the catalogue."""

_BUCKETS: Final = {metric.name: metric.buckets for metric in METRICS if metric.type == "histogram"}


@dataclass(frozen=True, slots=True)
class Example:
    """The newest observation of a bucket, and the step that it is of; `timestamp` in seconds since the epoch."""

    step: int
    value: float
    timestamp: float


@dataclass
class Histogram:
    """Observations of one series; `counts[i]` are those up to `bounds[i]`, the last one all the others."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    examples: dict[int, Example] = field(default_factory=dict)
    """By bucket."""
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, example: Example | None = None) -> None:
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if example is not None:
            self.examples[bucket] = example


class Meter:
    """One call for each way in which figures come. Families are named as in the catalogue; KeyError for another name.

    Whoever shares it between threads guards it.
    """

    def __init__(self) -> None:
        self._rows: dict[str, dict[Labels, float]] = {m.name: {} for m in METRICS if m.type != "histogram"}
        self._histograms: dict[str, dict[Labels, Histogram]] = {name: {} for name in _BUCKETS}
        self._shown: dict[str, dict[Labels, float]] = {}

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Counters that are counted here."""
        rows = self._rows[name]
        rows[labels] = rows.get(labels, 0) + amount

    def put(self, name: str, rows: Mapping[Labels, float]) -> None:
        """All series of a gauge, or of a counter that is counted elsewhere, as they are now."""
        series = self._rows[name]
        series.clear()
        series.update(rows)

    def put_one(self, name: str, value: float | None) -> None:
        """A gauge, or a counter that is counted elsewhere, without labels; absent when there is no value."""
        self.put(name, {} if value is None else {(): value})

    def observe(self, name: str, value: float, *labels: str, step: int | None = None, timestamp: float = 0.0) -> None:
        """One observation of a histogram, with the step that it is of."""
        series = self._histograms[name]
        if labels not in series:
            series[labels] = Histogram(_BUCKETS[name])
        series[labels].observe(value, None if step is None else Example(step, value, timestamp or time.time()))

    def ahead(self, name: str, rows: Mapping[Labels, float]) -> None:
        """A counter's part that `add` will be told later, when what is under way has ended.

        What is shown never goes back: at the moment of that `add`, or when the parts turn out a little smaller.
        """
        totals, shown = self._rows[name], self._shown.setdefault(name, {})
        for labels in totals.keys() | rows.keys():
            now = totals.get(labels, 0) + rows.get(labels, 0)
            shown[labels] = max(shown.get(labels, 0), now)

    def rows(self, name: str) -> Mapping[Labels, float]:
        """What was added or put."""
        return self._rows[name]

    def shown(self, name: str) -> Mapping[Labels, float]:
        """The same with what is ahead."""
        return self._shown.get(name) or self._rows[name]

    def histograms(self, name: str) -> Mapping[Labels, Histogram]:
        return self._histograms[name]
