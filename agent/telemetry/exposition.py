"""What the meter holds as text for Prometheus: all that does not change from scrape to scrape is written once.

prometheus_client's own encoders escape every label of every sample anew, which took 7 ms of a core for 335 series. The
tests hold this text against theirs, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client.utils import floatToGoString

from tidegate.agent.telemetry.metric_store import Histogram, Labels, Meter
from tidegate.metrics.catalogue import METRICS
from tidegate.metrics.family import Metric

_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Exposition:
    """The families of a rank, those of storage paths only if it has any. Not to be shared between threads."""

    def __init__(self, has_paths: bool) -> None:
        self._families = [metric for metric in METRICS if metric.needs != "paths" or has_paths]
        self._heads = {
            (metric.name, openmetrics): _head(metric, openmetrics)
            for metric in self._families
            for openmetrics in (False, True)
        }
        self._series: dict[str, dict[Labels, str]] = {metric.name: {} for metric in self._families}
        self._buckets: dict[str, dict[Labels, tuple[str, ...]]] = {metric.name: {} for metric in self._families}

    def text(self, meter: Meter, openmetrics: bool) -> bytes:
        """In Prometheus's text format, or as OpenMetrics, with the newest observation of a bucket as its exemplar."""
        out: list[str] = []
        for metric in self._families:
            if metric.type == "histogram":
                out.append(self._heads[metric.name, openmetrics])
                self._add_histograms(out, metric, meter.histograms(metric.name), openmetrics)
                continue
            rows = meter.shown(metric.name)
            if not rows and metric.needs == "nvml":
                continue
            out.append(self._heads[metric.name, openmetrics])
            series = self._series[metric.name]
            for labels, value in rows.items():
                if (begin := series.get(labels)) is None:
                    begin = series[labels] = _series(metric.name, metric.labels, labels)
                out.append(f"{begin} {_number(value)}\n")
        if openmetrics:
            out.append("# EOF\n")
        return "".join(out).encode()

    def _add_histograms(
        self, out: list[str], metric: Metric, rows: Mapping[Labels, Histogram], openmetrics: bool
    ) -> None:
        for labels, histogram in rows.items():
            if (begins := self._buckets[metric.name].get(labels)) is None:
                begins = self._buckets[metric.name][labels] = _histogram_series(metric, labels)
            seen = 0
            for i, count in enumerate(histogram.counts):
                seen += count
                exemplar = ""
                if openmetrics and (example := histogram.examples.get(i)) is not None:
                    value = _number(example.value)
                    exemplar = f' # {{step="{example.step}"}} {value} {example.timestamp}'
                out.append(f"{begins[i]} {_number(seen)}{exemplar}\n")
            out.append(f"{begins[-2]} {_number(seen)}\n{begins[-1]} {_number(histogram.total)}\n")


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _head(metric: Metric, openmetrics: bool) -> str:
    # OpenMetrics names the family of a counter without what its samples end with.
    name = metric.name.removesuffix("_total") if openmetrics else metric.name
    return f"# HELP {name} {metric.help}\n# TYPE {name} {metric.type}\n"


def _series(name: str, names: Sequence[str] | Mapping[str, object], values: Labels) -> str:
    """A sample without its value."""
    pairs = sorted(zip(names, values, strict=True))
    inside = ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in pairs)
    return f"{name}{{{inside}}}" if inside else name


def _histogram_series(metric: Metric, labels: Labels) -> tuple[str, ...]:
    """Those of its buckets, of the count and of the sum."""
    names = (*metric.labels, "le")
    bounds = (*(str(float(bound)) for bound in metric.buckets), "+Inf")
    return (
        *(_series(f"{metric.name}_bucket", names, (*labels, bound)) for bound in bounds),
        _series(f"{metric.name}_count", tuple(metric.labels), labels),
        _series(f"{metric.name}_sum", tuple(metric.labels), labels),
    )
