"""Charts as SVG text. The background is white, so that a chart can be read on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 760
HEIGHT: Final = 400
LEFT: Final = 76
RIGHT: Final = 20
BOTTOM: Final = 58
LEGEND_ROW: Final = 22
CHARACTER: Final = 7.2
"""Width of a character of the legend in pixels, a little more than the mean."""
INK: Final = "#1f2937"
GRID: Final = "#e5e7eb"
LEVEL: Final = "#b91c1c"
COLOURS: Final = ("#0b5fce", "#c2570c", "#15803d", "#7e22ce", "#6b7280", "#0e7490")
DASHES: Final = ("6 4", "2 3", "10 3 2 3")


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def share(self, figure: float) -> float:
        """Where a figure is between both ends of the axis: 0 to 1."""
        low, high, here = (math.log(one) if self.log else one for one in (self.low, self.high, figure))
        return min(max((here - low) / (high - low), 0.0), 1.0)


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points of one colour. line: whether a line joins them. dots: whether each is drawn as a dot."""

    name: str
    points: tuple[Point, ...]
    line: bool = False
    dots: bool = True
    hollow: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line with its name in the legend."""

    name: str
    y: float


def linear(label: str, figures: Iterable[float], *, zero: bool = False) -> Axis:
    """An axis with about five round ticks. zero: whether it begins at zero."""
    found = [*figures, *([0.0] if zero else [])]
    low, high = min(found), max(found)
    step = _round((high - low) / 5 or abs(high) or 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]
    return Axis(label, ticks[0], ticks[-1], tuple((tick, f"{tick:g}") for tick in ticks))


def logarithmic(label: str, figures: Iterable[float]) -> Axis:
    """An axis whose ticks are 1, 2 and 5 times powers of 10."""
    found = list(figures)
    steps = [factor * 10.0**power for power in range(-6, 7) for factor in (1, 2, 5)]
    low = max(step for step in steps if step <= min(found))
    high = min(step for step in steps if step >= max(found))
    return Axis(label, low, high, tuple((step, f"{step:g}") for step in steps if low <= step <= high), log=True)


def categories(label: str, names: Sequence[str]) -> Axis:
    """An axis with a name at 0, 1, 2 and so on."""
    return Axis(label, -0.5, len(names) - 0.5, tuple(enumerate(names)))


def chart(x: Axis, y: Axis, series: Sequence[Series], levels: Sequence[Level] = ()) -> str:
    """A chart with its legend above it."""
    entries = [*((one.name, _mark(index, one)) for index, one in enumerate(series))]
    entries += [(one.name, _level_mark(index)) for index, one in enumerate(levels)]
    rows = legend_rows([name for name, _ in entries], WIDTH - LEFT - RIGHT)
    place = _Place(x, y, 14 + LEGEND_ROW * len(rows))
    body = [
        *_frame(place),
        *(_level(place, index, one) for index, one in enumerate(levels)),
        *(text for index, one in enumerate(series) for text in _series(place, index, one)),
        *_legend(rows, dict(entries)),
    ]
    return document(WIDTH, HEIGHT, body)


def document(width: int, height: int, body: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">'
    )
    paper = f'<rect width="{width}" height="{height}" rx="6" fill="white"/>'
    return "\n".join([head, paper, *body, "</svg>\n"])


def legend_rows(names: Sequence[str], width: float) -> list[list[tuple[float, str]]]:
    """The names in rows that fit `width`, each with its distance from the left."""
    rows: list[list[tuple[float, str]]] = [[]]
    at = 0.0
    for name in names:
        wide = 46 + CHARACTER * len(name)
        if rows[-1] and at + wide > width:
            rows.append([])
            at = 0.0
        rows[-1].append((at, name))
        at += wide
    return rows


def text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{more}/>'


def rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


@dataclass(frozen=True)
class _Place:
    """Pixels of figures on both axes. top: where the area of the chart begins, below the legend."""

    x_axis: Axis
    y_axis: Axis
    top: float

    @property
    def bottom(self) -> float:
        return HEIGHT - BOTTOM

    def x(self, figure: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * self.x_axis.share(figure)

    def y(self, figure: float) -> float:
        return self.bottom - (self.bottom - self.top) * self.y_axis.share(figure)


def _frame(place: _Place) -> Iterator[str]:
    for figure, label in place.y_axis.ticks:
        yield line(LEFT, place.y(figure), WIDTH - RIGHT, place.y(figure), GRID)
        yield text(LEFT - 8, place.y(figure) + 4.5, label, "end")
    for figure, label in place.x_axis.ticks:
        yield line(place.x(figure), place.bottom, place.x(figure), place.bottom + 5, INK)
        yield text(place.x(figure), place.bottom + 20, label, "middle")
    yield line(LEFT, place.bottom, WIDTH - RIGHT, place.bottom, INK)
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, place.x_axis.label, "middle")
    middle = (place.top + place.bottom) / 2
    yield text(18, middle, place.y_axis.label, "middle", f' transform="rotate(-90 18 {middle:.1f})"')


def _series(place: _Place, index: int, series: Series) -> Iterator[str]:
    colour = COLOURS[index % len(COLOURS)]
    if series.line:
        corners = " ".join(f"{place.x(point.x):.1f},{place.y(point.y):.1f}" for point in series.points)
        yield f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
    for point in series.points:
        x = place.x(point.x)
        if point.low is not None and point.high is not None:
            yield line(x, place.y(point.low), x, place.y(point.high), colour, ' stroke-width="2" stroke-opacity="0.55"')
        if series.dots:
            yield _dot(x, place.y(point.y), colour, series.hollow)


def _dot(x: float, y: float, colour: str, hollow: bool) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{"white" if hollow else colour}" stroke="{colour}"/>'


def _level(place: _Place, index: int, level: Level) -> str:
    return line(LEFT, place.y(level.y), WIDTH - RIGHT, place.y(level.y), LEVEL, _dashed(index))


def _dashed(index: int) -> str:
    return f' stroke-width="1.5" stroke-dasharray="{DASHES[index % len(DASHES)]}"'


def _mark(index: int, series: Series) -> str:
    colour = COLOURS[index % len(COLOURS)]
    joined = line(0, 0, 22, 0, colour, ' stroke-width="1.8"') if series.line else ""
    return joined + (_dot(11, 0, colour, series.hollow) if series.dots else "")


def _level_mark(index: int) -> str:
    return line(0, 0, 22, 0, LEVEL, _dashed(index))


def _legend(rows: Sequence[Sequence[tuple[float, str]]], marks: dict[str, str]) -> Iterator[str]:
    for row, entries in enumerate(rows):
        for at, name in entries:
            x, y = LEFT + at, 18 + LEGEND_ROW * row
            yield f'<g transform="translate({x:.1f} {y})">{marks[name]}</g>'
            yield text(x + 28, y + 4.5, name)


def _round(step: float) -> float:
    """The least of 1, 2 and 5 times a power of 10 that is not less than `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))
