"""Text format of all metrics for Prometheus, with cached series names and headers.

prometheus_client's own encoders escape every label of every sample at each scrape: 2.8 ms of a core for 280 series, and
0.2 ms here. The overhead of steps of 0.3 s has no room for more under its bound (`docs/decisions/telemetry.md`).
Tests check that the text is equal to theirs, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client.utils import floatToGoString

from tidegate.agent.telemetry.metric_store import Histogram, Labels, MetricStore
from tidegate.metrics.catalogue import METRICS
from tidegate.metrics.family import Metric

_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Exposition:
    """Writes all metrics of a rank in the text format. Metrics of storage paths are included only if the rank has
    paths. Not to be shared between threads."""

    def __init__(self, has_paths: bool) -> None:
        self._families = [metric for metric in METRICS if metric.needs != "paths" or has_paths]
        self._heads = {
            (metric.name, openmetrics): _head(metric, openmetrics)
            for metric in self._families
            for openmetrics in (False, True)
        }
        self._series: dict[str, dict[Labels, str]] = {metric.name: {} for metric in self._families}
        self._buckets: dict[str, dict[Labels, tuple[str, ...]]] = {metric.name: {} for metric in self._families}

    def text(self, metrics: MetricStore, openmetrics: bool) -> bytes:
        """Text of all metrics in Prometheus's format or, with `openmetrics`, in the OpenMetrics format. There each
        histogram bucket has its newest observation as exemplar."""
        out: list[str] = []
        for metric in self._families:
            if metric.type == "histogram":
                out.append(self._heads[metric.name, openmetrics])
                self._add_histograms(out, metric, metrics.histograms(metric.name), openmetrics)
                continue
            rows = metrics.rows_with_pending(metric.name)
            if not rows and metric.needs == "nvml":
                continue
            out.append(self._heads[metric.name, openmetrics])
            series = self._series[metric.name]
            for labels, value in rows.items():
                if (name := series.get(labels)) is None:
                    name = series[labels] = _series(metric.name, metric.labels, labels)
                out.append(f"{name} {_number(value)}\n")
        if openmetrics:
            out.append("# EOF\n")
        return "".join(out).encode()

    def _add_histograms(
        self, out: list[str], metric: Metric, rows: Mapping[Labels, Histogram], openmetrics: bool
    ) -> None:
        for labels, histogram in rows.items():
            if (names := self._buckets[metric.name].get(labels)) is None:
                names = self._buckets[metric.name][labels] = _histogram_series(metric, labels)
            cumulative = 0
            for i, count in enumerate(histogram.counts):
                cumulative += count
                suffix = ""
                if openmetrics and (exemplar := histogram.exemplars.get(i)) is not None:
                    value = _number(exemplar.value)
                    suffix = f' # {{step="{exemplar.step}"}} {value} {exemplar.timestamp}'
                out.append(f"{names[i]} {_number(cumulative)}{suffix}\n")
            out.append(f"{names[-2]} {_number(cumulative)}\n{names[-1]} {_number(histogram.total)}\n")


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _head(metric: Metric, openmetrics: bool) -> str:
    """The HELP and TYPE lines with which the text of a metric begins."""
    # OpenMetrics names the family of a counter without the suffix `_total` of its samples.
    name = metric.name.removesuffix("_total") if openmetrics else metric.name
    return f"# HELP {name} {metric.help}\n# TYPE {name} {metric.type}\n"


def _series(name: str, names: Sequence[str] | Mapping[str, object], values: Labels) -> str:
    """Name and labels of a sample, without its value."""
    pairs = sorted(zip(names, values, strict=True))
    inside = ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in pairs)
    return f"{name}{{{inside}}}" if inside else name


def _histogram_series(metric: Metric, labels: Labels) -> tuple[str, ...]:
    """Names and labels of a histogram's samples: buckets, count, sum."""
    names = (*metric.labels, "le")
    bounds = (*(str(float(bound)) for bound in metric.buckets), "+Inf")
    return (
        *(_series(f"{metric.name}_bucket", names, (*labels, bound)) for bound in bounds),
        _series(f"{metric.name}_count", tuple(metric.labels), labels),
        _series(f"{metric.name}_sum", tuple(metric.labels), labels),
    )
