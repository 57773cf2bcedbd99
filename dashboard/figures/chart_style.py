"""Common layout, axes and colours of all charts. A figure is a plain dict, as Plotly's JavaScript takes it.

Axes are set up so that Plotly need not measure their labels. The labels of a live chart change with each step, and a
measurement is expensive: Plotly lays out the page, and caches up to 10,000 sizes of texts. So axes of numbers have
fixed margins, no titles (the unit is at the last tick), and labels that may extend beyond the axis. `themed` replaces
Streamlit's theme, in which Plotly would have to measure where titles go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from tidegate.dashboard.style import markup, palette

Figure = dict[str, Any]
"""`data`, a list of traces, and `layout`."""
Trace = dict[str, Any]
Axis = dict[str, Any]

SMALL: Final = 170
TALL: Final = 214
MARGIN: Final = {"l": 52, "r": 10, "t": 6, "b": 26, "pad": 4}
LEGEND_HEIGHT: Final = 18
TICKS: Final = {"size": 10.5}
FONT: Final = '"Source Sans", sans-serif'
CLEAR: Final = "rgba(0,0,0,0)"
DIGITS: Final = 5
"""Significant digits of each number that is sent to the browser: more than a chart can show."""


def figure(
    traces: Sequence[Trace], x: Axis, y: Axis, height: int = SMALL, *, legend: bool = False, **layout: object
) -> Figure:
    """A figure of traces on two axes, without the colours of a theme."""
    return {"data": list(traces), "layout": frame(height, legend=legend) | {"xaxis": x, "yaxis": y} | layout}


def frame(height: int, *, legend: bool) -> dict[str, object]:
    """The layout of a figure, without its axes."""
    return {
        "height": height,
        "margin": MARGIN | {"t": MARGIN["t"] + LEGEND_HEIGHT * legend},
        "showlegend": legend,
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "font": {"size": 11}},
        "hoverlabel": {"align": "left", "font": {"size": 12}},
        "dragmode": False,
        "uirevision": "keep",
    }


def themed(drawn: Figure, theme: palette.Theme) -> Figure:
    """The figure in the colours of the page's theme."""
    axis = {"gridcolor": palette.GRID[theme], "linecolor": palette.GRID[theme], "zerolinecolor": palette.GRID[theme]}
    look = {
        "font": {"family": FONT, "size": 11, "color": palette.LABEL[theme]},
        "hoverlabel": {"bgcolor": palette.GROUND[theme], "bordercolor": palette.GRID[theme],
                       "font": {"color": palette.INK[theme], "family": FONT}},
        "paper_bgcolor": CLEAR, "plot_bgcolor": CLEAR, "xaxis": axis, "yaxis": axis,
    }  # fmt: skip
    return drawn | {"layout": {"template": {"layout": look}} | drawn["layout"]}


def numbers(unit: str = "", **more: object) -> Axis:
    """An axis of numbers, with the unit after the number of the last tick. more: further Plotly settings."""
    ticks = {"ticksuffix": f" {unit}", "showticksuffix": "last"} if unit else {}
    kept = {"automargin": False, "tickangle": 0, "ticklabeloverflow": "allow", "tickfont": TICKS}
    return kept | {"zeroline": False, "nticks": 5} | ticks | more


def names(**more: object) -> Axis:
    """An axis of names, with space for the longest name. more: further Plotly settings."""
    return {"type": "category", "automargin": True, "tickfont": TICKS, "showgrid": False, "zeroline": False} | more


def steps(first: int, last: int, ticks: int) -> Axis:
    """An axis of step numbers with about `ticks` labels; with fewer steps, one label for each step."""
    spacing = {"nticks": ticks} if last - first > ticks else {"dtick": 1}
    said = {"tickformat": "d", "tickprefix": "step ", "showtickprefix": "first", "showgrid": False}
    return numbers() | said | spacing


def empty(message: str, height: int = SMALL) -> Figure:
    """A figure without data that shows a message."""
    said = {"text": markup.chart(message), "showarrow": False, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper",
            "font": {"size": 12, "color": palette.GREY}}  # fmt: skip
    return figure([], {"visible": False}, {"visible": False}, height, annotations=[said])


def short(values: Iterable[float]) -> list[float]:
    """The values rounded to `DIGITS` significant digits."""
    return [float(f"{value:.{DIGITS}g}") for value in values]


def hatched(color: str) -> dict[str, object]:
    """Plotly's `marker` (fill and outline) for the bar of a stall: stripes of `color` on grey that is visible in the
    light and the dark theme."""
    return {
        "color": "rgba(128,128,128,0.18)",
        "line": {"color": color, "width": 1},
        "pattern": {"shape": "/", "fgcolor": color, "size": 6, "solidity": 0.45, "fillmode": "overlay"},
    }


def ends(names: Sequence[str], lengths: Sequence[float], labels: Sequence[str]) -> Trace:
    """A Plotly trace that writes a text after the bar of each row, such as the row's total.

    names: the rows. lengths: length of each bar, in the unit of the axis. labels: the texts. The axis must leave space
    for the texts.
    """
    return {
        "type": "scatter", "x": short(lengths), "y": [markup.chart(name) for name in names],
        "text": [f" {label}" for label in labels],
        "mode": "text", "textposition": "middle right", "textfont": {"size": 11}, "cliponaxis": False,
        "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip


def time_scale(longest: float) -> tuple[float, str]:
    """Factor and unit for an axis of durations up to `longest` seconds."""
    return (1.0, "s") if longest >= 2.0 else (1e3, "ms")


def byte_scale(largest: float) -> tuple[float, str]:
    """Factor and unit for an axis of sizes up to `largest` bytes."""
    return next(
        ((1 / size, unit) for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if largest >= size), (1.0, "B")
    )
