"""Generator of the page that documents all metrics, from the catalogue:
`python -m tidegate.metrics.page > docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.metrics.catalogue import DAEMON_METRICS, METRICS
from tidegate.metrics.family import MAX_SERIES, PATH, Metric

_FOUR_PATHS = ("a", "b", "c", "d")
_HEAD = """# Metrics

Made of `tidegate/metrics/catalogue.py` (edit that): `python -m tidegate.metrics.page > docs/metrics.md`.

Each rank serves its families on a port of its own; the daemon serves those of the control plane. Prometheus adds
`run`, `rank`, `host` and `device_kind` from the daemon's service discovery (`GET /sd`). What a machine or a run does
not have is absent, never zero. Counters of storage paths and their busy time go on inside a phase, operations in
progress included; the other counters are brought up to date when a step ends.

A rank serves at most 4 connections at a time, each for 10 s; a fifth one ends the oldest. So whoever keeps connections
open takes no threads and no descriptors from the training.

Where OpenMetrics is negotiated, the buckets of `tidegate_phase_seconds` carry an exemplar with the number of the
newest `step` that fell into them.
"""


def page() -> str:
    """The text of docs/metrics.md: a table of all metric families, as Markdown."""
    return "\n".join(
        (
            _HEAD,
            f"A rank without storage paths has at most {_series(())} series, one with four {_series(_FOUR_PATHS)}; the "
            f"bound is {MAX_SERIES}.\n",
            "## Of a rank\n",
            *_table(METRICS),
            "## Of the daemon\n",
            "They also carry `run`, and those of requests `route`, `method` and `status`.\n",
            *_table(DAEMON_METRICS),
            "## Closed sets\n",
            "Label | Values | Families",
            "--- | --- | ---",
            *_label_rows(),
            "",
            f"`{PATH}` stands for each of the names of the run's storage paths.",
        )
    )


def _series(paths: tuple[str, ...]) -> int:
    return sum(metric.max_series(paths) for metric in METRICS)


def _table(metrics: Iterable[Metric]) -> Iterable[str]:
    yield "Family | Type, unit | Labels | Says | Seen in the live view | Series with 0, 4 paths"
    yield "--- | --- | --- | --- | --- | ---"
    for metric in metrics:
        few, many = metric.max_series(), metric.max_series(_FOUR_PATHS)
        yield " | ".join(
            (
                f"`{metric.name}`",
                f"{metric.type}, {metric.unit}",
                ", ".join(f"`{label}`" for label in metric.labels),
                metric.help.replace("|", "\\|") + _NEEDS[metric.needs],
                metric.screen or f"no: {metric.unseen}",
                f"{few}, {many}",
            )
        )
    yield ""


_NEEDS = {"": "", "paths": " Runs with storage paths only.", "nvml": " Where NVML knows the GPU only."}


def _label_rows() -> Iterable[str]:
    sets: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for metric in (*METRICS, *DAEMON_METRICS):
        for label, values in metric.labels.items():
            sets.setdefault((label, values), []).append(metric.name.removeprefix("tidegate_"))
    for (label, values), names in sets.items():
        yield f"`{label}` | {', '.join(f'`{value}`' for value in values)} | {', '.join(names)}"


if __name__ == "__main__":
    print(page())
