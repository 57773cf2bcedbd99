"""The table of metrics: whole, within its bounds, and the page and the screens that are made from it or named in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tidegate.metrics.catalogue import BY_NAME, DAEMON_METRICS, METRICS
from tidegate.metrics.family import MAX_SERIES, Metric
from tidegate.metrics.page import page

ROOT = Path(__file__).parents[2]
FOUR_PATHS = ("nvme", "pfs", "scratch", "s3")
ALL = METRICS + DAEMON_METRICS
BASE_UNITS = {
    "seconds", "bytes", "bytes/s", "bytes/day", "1", "steps", "tokens", "parameters", "subgroups", "attempts", "waits",
    "agents", "connections", "requests",
}  # fmt: skip


def test_no_name_is_there_twice() -> None:
    assert len(BY_NAME) == len(ALL)


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_a_name_says_its_type_and_unit(metric: Metric) -> None:
    assert re.fullmatch(r"tidegate(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert metric.unit in BASE_UNITS
    name = metric.name.removesuffix("_total")
    for unit, suffix in {
        "seconds": "_seconds", "bytes": "_bytes", "bytes/s": "_bytes_per_second", "bytes/day": "_bytes_per_day",
    }.items():  # fmt: skip
        assert name.endswith(suffix) == (metric.unit == unit), metric.name
    assert bool(metric.buckets) == (metric.type == "histogram")
    assert list(metric.buckets) == sorted(metric.buckets)
    assert metric.help.endswith(".")


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_each_family_is_on_a_screen_that_is_there_or_says_why_not(metric: Metric) -> None:
    assert bool(metric.screen) != bool(metric.unseen)
    titles = {
        title
        for path in (ROOT / "dashboard").rglob("*.py")
        for title in re.findall(r'markup\.title\(\s*f?"([^"]+)"', path.read_text())
    }
    assert metric.screen in {None, "Header", *titles}


def test_a_rank_has_few_series_whatever_happens() -> None:
    assert sum(metric.max_series(FOUR_PATHS) for metric in METRICS) <= MAX_SERIES


def test_the_page_is_the_one_of_this_catalogue() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == page() + "\n", (
        "python -m tidegate.metrics.page > docs/metrics.md"
    )
