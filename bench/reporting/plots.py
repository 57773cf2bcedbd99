"""The plots of the page, from lines of results. Each function returns SVG text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from reporting.chart import Axis, Level, Point, Series, categories, chart, linear, logarithmic
from reporting.figures import Unit
from reporting.lines import Line, Runs, Value, of_quartiles, of_spread, value

Plot = Callable[[Sequence[Runs]], str]

ABLATIONS: Final = {
    "no_cache": "no cache", "no_remainder": "no remainder", "no_16_bit": "no 16 bits", "one_path": "one path",
    "no_exclusive_access": "not exclusive", "all_off": "all five off",
}  # fmt: skip
INTERLEAVED: Final = {"all on the CPU": "off", **{f"stride {stride}": str(stride) for stride in range(1, 9)}}
"""Configurations of bench/interleaving.py, and what the axis calls them."""


def over_runs(paths: Mapping[str, str], label: str, unit: Unit, levels: Sequence[Level]) -> Plot:
    """A figure, or several, in all committed runs, one after the other. paths: what the legend calls each figure, and
    where it is in a line. levels: bounds, in the figure's own unit."""

    def plot(found: Sequence[Runs]) -> str:
        series = []
        for runs in found:
            for name, path in paths.items():
                points = [
                    _point(index, one, unit.factor)
                    for index, line in enumerate(runs.lines, 1)
                    if (one := value(line, path)) is not None
                ]
                series.append(Series(_named(runs, name, found), tuple(points), line=True))
        shown = [Level(level.name, level.y * unit.factor) for level in levels]
        return chart(_runs_axis(found), linear(label, _heights(series, shown)), series, shown)

    return plot


def adaptation(found: Sequence[Runs]) -> str:
    """bench/multipath.py: the update time in each step after the fastest path became slower, relative to the
    best split."""
    series = []
    for runs in found:
        for count in ("2", "3"):
            slowed = runs.newest[f"{count}_paths"]["slowed"]
            by_step = enumerate(slowed["update_seconds_by_step"], 1)
            points = tuple(Point(step, seconds / slowed["best_update_seconds"]) for step, seconds in by_step)
            series.append(Series(_named(runs, f"{count} paths", found), points, line=True))
    levels = [Level("the best split", 1.0), Level("bound: 10 % more", 1.1)]
    steps = max(len(one.points) for one in series)
    y = linear("update time relative to the best split", _heights(series, levels))
    return chart(_steps_axis(steps), y, series, levels)


def ablation(found: Sequence[Runs]) -> str:
    series = [
        Series(
            runs.label,
            tuple(
                _point(index, of_spread(runs.newest["variants"][name]["slower_by"]))
                for index, name in enumerate(ABLATIONS)
            ),
        )
        for runs in found
    ]
    levels = [Level("with all features", 1.0)]
    y = linear("update time relative to all features on", _heights(series, levels))
    return chart(categories("without this feature (emulated GPU)", list(ABLATIONS.values())), y, series, levels)


def interleaving(found: Sequence[Runs]) -> str:
    series, levels = [], []
    for runs in found:
        times = {name: of_spread(spread) for name, spread in runs.newest["update_seconds"].items()}
        points = [_point(index, times[name], 1e3) for index, name in enumerate(INTERLEAVED)]
        series.append(Series(_named(runs, "fixed strides", found), tuple(points), line=True))
        for name in ("auto", "twinflow", "auto, same residents"):
            shown = {"twinflow": "TwinFlow", "auto, same residents": "auto, TwinFlow's residents"}.get(name, name)
            levels.append(Level(_named(runs, shown, found), 1e3 * times[name].middle))
    y = linear("update, ms (emulated GPU)", _heights(series, levels), zero=True)
    return chart(categories("stride (off: all updates on the CPU)", list(INTERLEAVED.values())), y, series, levels)


def strides_of_the_tuner(found: Sequence[Runs]) -> str:
    """bench/tuner.py: the update time of each fixed stride, with the link as it is and with half of it."""
    names = list(found[0].newest["before"])
    series = []
    for runs in found:
        for key, name in (("before", "the whole link"), ("halved", "half of the link")):
            points = [Point(index, 1e3 * runs.newest[key][stride]) for index, stride in enumerate(names)]
            series.append(Series(_named(runs, name, found), tuple(points), line=True))
    y = linear("update, ms (emulated GPU)", _heights(series, []), zero=True)
    axis = categories("stride (off: all updates on the CPU)", [name.removesuffix(".0") for name in names])
    return chart(axis, y, series)


def predictions(found: Sequence[Runs]) -> str:
    """bench/prediction.py: predicted against measured update times of one newest run. Exact predictions are on the
    diagonal."""
    table = found[0].newest["table"]
    series = []
    for name, emulated in (("busiest lane real", False), ("busiest lane emulated", True)):
        rows = [row for row in table if row["emulated"] == emulated]
        points = tuple(Point(of_quartiles(row["measured_ms"]).middle, row["predicted_ms"]) for row in rows)
        series.append(Series(name, points))
    equation = [Point(row["measured_ms"][1], row["equation_ms"]) for row in table]
    figures = [figure for one in series for point in one.points for figure in (point.x, point.y)]
    x = logarithmic("measured update, ms (emulated GPU)", figures)
    y = logarithmic("predicted update, ms", [*figures, *(point.y for point in equation)])
    ends = tuple(Point(one, one) for one in (max(x.low, y.low), min(x.high, y.high)))
    series += [
        Series("exact", ends, line=True, dots=False),
        Series("the papers' equations", tuple(equation), hollow=True),
    ]
    return chart(x, y, series)


def memory(found: Sequence[Runs]) -> str:
    """bench/soak.py: memory of each program relative to its first sample after the warm-up (a quarter of the run)."""
    newest = found[0].newest
    series = []
    for name in ("server", "browser", "heap", "daemon"):
        samples = newest[f"{name}_megabytes"]
        each = newest["minutes"] / (len(samples) - 1)
        first = samples[len(samples) // 4]
        points = tuple(
            Point(round(index * each, 1), 100 * (one / first - 1)) for index, one in enumerate(samples) if index
        )
        series.append(Series("JavaScript heap" if name == "heap" else name, points, line=True, dots=False))
    levels = [Level("bound: 5 % more", 5.0)]
    y = linear("memory since the warm-up ended, % more", _heights(series, levels))
    return chart(linear("minutes", [point.x for point in series[0].points], zero=True), y, series, levels)


def papers(rows: Sequence[Mapping[str, Any]]) -> str:
    """Our figure divided by the paper's, for each figure of both papers."""
    series = []
    for name, prefix in (("Deep Optimizer States", ("dos", "v100")), ("MLP-Offload", ("mlp",))):
        ratios = sorted(row["ours"] / row["reported"] for row in rows if row["ours"] and row["id"].startswith(prefix))
        series.append(Series(name, tuple(Point(rank, ratio) for rank, ratio in enumerate(ratios, 1))))
    levels = [Level("equal", 1.0), Level("20 % less", 0.8), Level("20 % more", 1.2)]
    y = linear("our figure divided by the paper's", _heights(series, levels), zero=True)
    most = max(len(one.points) for one in series)
    return chart(linear("figures of a paper, in the order of this ratio", [1, most], zero=True), y, series, levels)


def strides(settings: Sequence[Line]) -> str:
    """The stage `updates` of bench/gpu.sh without residents: measured, predicted, and the bound of the busiest
    resource."""
    rows = [row for row in settings if row["static_ratio"] == 0]
    measured = [_point(index, of_spread(row["update_seconds"]), 1e3) for index, row in enumerate(rows)]
    series = [Series("measured", tuple(measured), line=True)]
    for name, key in (("predicted", "predicted_seconds"), ("bound", "bound_seconds")):
        points = tuple(Point(index, 1e3 * row[key]) for index, row in enumerate(rows))
        series.append(Series(name, points, line=True, hollow=True))
    names = [f"{row['stride']:g}" if row["stride"] != "off" else "off" for row in rows]
    y = linear("update, ms", _heights(series, []), zero=True)
    return chart(categories("stride (off: all updates on the CPU)", names), y, series)


def _point(x: float, found: Value, factor: float = 1.0) -> Point:
    if found.low is None or found.high is None:
        return Point(x, factor * found.middle)
    return Point(x, factor * found.middle, factor * found.low, factor * found.high)


def _named(runs: Runs, name: str, found: Sequence[Runs]) -> str:
    """The hardware is part of the name where there are several."""
    return f"{runs.label}: {name}" if len(found) > 1 else name


def _heights(series: Sequence[Series], levels: Sequence[Level]) -> list[float]:
    points = [point for one in series for point in one.points]
    ends = [end for point in points for end in (point.low, point.high) if end is not None]
    return [*(point.y for point in points), *ends, *(level.y for level in levels)]


def _runs_axis(found: Sequence[Runs]) -> Axis:
    most = max(len(runs.lines) for runs in found)
    emulated = any("emulated" in str(runs.newest.get("device")) for runs in found)
    label = f"committed run (the last one is the newest{'; emulated GPU' if emulated else ''})"
    return Axis(label, 0.5, most + 0.5, _numbers(most))


def _steps_axis(steps: int) -> Axis:
    return Axis(
        "step after the fastest path became four times slower (emulated GPU)", 0.5, steps + 0.5, _numbers(steps)
    )


def _numbers(count: int) -> tuple[tuple[float, str], ...]:
    return tuple((number, str(number)) for number in range(1, count + 1))
