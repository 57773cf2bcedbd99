"""The text of /metrics, held against prometheus_client's own encoders, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from tests.agent.telemetry.replay import replay
from tidegate.agent.telemetry.exposition import Exposition
from tidegate.agent.telemetry.metric_store import Histogram, MetricStore
from tidegate.metrics.catalogue import METRICS
from tidegate.metrics.family import Metric


class Oracle(Collector):
    """Families as the library has them."""

    def __init__(self, meter: MetricStore, has_paths: bool) -> None:
        self._meter, self._has_paths = meter, has_paths

    def describe(self) -> Iterable[Family]:
        return ()

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            if metric.needs == "paths" and not self._has_paths:
                continue
            if metric.type == "histogram":
                yield self._histograms(metric)
            elif metric.needs != "nvml" or self._meter.rows_with_pending(metric.name):
                yield self._family(metric)

    def _histograms(self, metric: Metric) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=list(metric.labels))
        for labels, histogram in self._meter.histograms(metric.name).items():
            family.add_metric(labels, buckets(histogram), histogram.total)
        return family

    def _family(self, metric: Metric) -> Family:
        kind: Any = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
        family: CounterMetricFamily | GaugeMetricFamily = kind(metric.name, metric.help, labels=list(metric.labels))
        for labels, value in self._meter.rows_with_pending(metric.name).items():
            family.add_metric(labels, value)
        return family


def buckets(histogram: Histogram) -> list[Any]:
    seen, found = 0, []
    bounds = (*(str(float(bound)) for bound in histogram.bounds), "+Inf")
    for i, (bound, count) in enumerate(zip(bounds, histogram.counts, strict=True)):
        seen += count
        example = histogram.exemplars.get(i)
        exemplar = [] if example is None else [Exemplar({"step": str(example.step)}, example.value, example.timestamp)]
        found.append((bound, float(seen), *exemplar))
    return found


def said_by_the_library(meter: MetricStore, has_paths: bool, openmetrics: bool) -> bytes:
    registry = CollectorRegistry()
    registry.register(Oracle(meter, has_paths))
    text: bytes = (generate_openmetrics if openmetrics else generate_latest)(registry)
    return text


@pytest.mark.parametrize("openmetrics", [False, True])
@pytest.mark.parametrize("has_paths", [False, True])
def test_a_recorded_run_reads_as_the_library_writes_it(has_paths: bool, openmetrics: bool) -> None:
    meter, exposition = replay(MetricStore()), Exposition(has_paths)
    text = exposition.text(meter, openmetrics)
    assert text == said_by_the_library(meter, has_paths, openmetrics)
    assert exposition.text(meter, openmetrics) == text, "what is kept from the first time changes nothing"


@given(
    value=st.floats(allow_nan=True, allow_infinity=True),
    path=st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12),
    openmetrics=st.booleans(),
)
def test_any_value_and_any_label_does(value: float, path: str, openmetrics: bool) -> None:
    meter = MetricStore()
    meter.set_series("tidegate_loss", {(): value})
    meter.set_series("tidegate_path_free_bytes", {(path,): value})
    meter.observe("tidegate_path_operation_seconds", 0.25, path, "read")
    meter.observe("tidegate_phase_seconds", abs(value) if value == value else 1.0, "update", step=3, timestamp=1.5)
    said = partial(said_by_the_library, meter, True)
    assert Exposition(has_paths=True).text(meter, openmetrics) == said(openmetrics)


def test_what_needs_nvml_is_absent_without_it() -> None:
    assert b"tidegate_gpu" not in Exposition(has_paths=True).text(MetricStore(), openmetrics=False)
