"""Figures of the live view: data in, a Plotly figure out. The Gantt is in `gantt.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from tidegate.dashboard import palette, units
from tidegate.dashboard.digest import WINDOW
from tidegate.timeline import PHASES
from tidegate.wire import StepReport

MAX_POINTS = 120
SMALL = 170
TALL = 214


def frame(figure: go.Figure, height: int = SMALL, *, legend: bool = False) -> go.Figure:
    """The look that all figures share; colours of text and grid come from Streamlit's theme."""
    figure.update_layout(
        height=height,
        margin={"l": 4, "r": 8, "t": 24 if legend else 6, "b": 4},
        showlegend=legend,
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "font": {"size": 11}, "title": None},
        hoverlabel={"align": "left", "font": {"size": 12}},
        font={"size": 11},
        dragmode=False,
        transition={"duration": 0},
        uirevision="keep",
    )
    figure.update_xaxes(automargin=True, title={"font": {"size": 11}}, tickfont={"size": 10.5}, zeroline=False)
    figure.update_yaxes(automargin=True, title={"font": {"size": 11}}, tickfont={"size": 10.5}, zeroline=False)
    return figure


def empty(message: str, height: int = SMALL) -> go.Figure:
    """A figure that says why there is nothing to show."""
    figure = go.Figure()
    figure.add_annotation(
        text=message,
        showarrow=False,
        x=0.5,
        y=0.5,
        xref="paper",
        yref="paper",
        font={"size": 12, "color": palette.GREY},
    )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return frame(figure, height)


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step: a short name for the chart, and all of it for who points at it."""

    step: int
    name: str
    text: str


def phase_history(steps: Sequence[StepReport], marks: Sequence[Mark] = ()) -> go.Figure:
    """Seconds of each phase, stacked, step by step; a line wherever knobs changed."""
    recent = list(steps)[-MAX_POINTS:]
    if not recent:
        return empty("No step has finished yet.", TALL)
    longest = max(sum(step.phase_seconds.values()) for step in recent)
    scale, unit = time_scale(longest)
    figure = go.Figure()
    for phase in PHASES:
        values = [step.phase_seconds.get(phase, 0.0) for step in recent]
        if not any(values):
            continue
        figure.add_bar(
            x=[step.step for step in recent],
            y=[value * scale for value in values],
            name=phase,
            marker={"color": palette.PHASE[phase], "line": {"width": 0}},
            customdata=[units.seconds(value) for value in values],
            hovertemplate="step %{x}, " + phase + ": %{customdata}<extra></extra>",
        )
    _mark(figure, [mark for mark in marks if recent[0].step <= mark.step <= recent[-1].step], longest * scale)
    figure.update_layout(barmode="stack", bargap=0.15 if len(recent) <= 60 else 0)
    figure.update_yaxes(title=unit, range=[0, longest * scale * 1.14], nticks=5)
    _step_axis(figure, recent[0].step, recent[-1].step, 8)
    return frame(figure, TALL)


def _mark(figure: go.Figure, marks: Sequence[Mark], top: float) -> None:
    """A dotted line before the first step with the change, and its name above."""
    for mark in marks:
        figure.add_shape(
            type="line", x0=mark.step - 0.5, x1=mark.step - 0.5, y0=0, y1=top * 1.07,
            line={"color": palette.GREY, "width": 1.5, "dash": "dot"},
        )  # fmt: skip
    if marks:
        figure.add_scatter(
            x=[mark.step - 0.5 for mark in marks],
            y=[top * 1.10] * len(marks),
            text=[mark.name for mark in marks],
            mode="markers+text",
            textposition="middle right",
            textfont={"size": 10.5},
            marker={"symbol": "triangle-down", "size": 8, "color": palette.GREY},
            customdata=[mark.text for mark in marks],
            hovertemplate="%{customdata}<extra></extra>",
            cliponaxis=False,
            showlegend=False,
        )


def cpu_cores(steps: Sequence[StepReport]) -> go.Figure:
    """CPU seconds per second of each phase: how many cores it kept busy, step by step."""
    recent = list(steps)[-MAX_POINTS:]
    figure = go.Figure()
    for phase in PHASES:
        points = [
            (step.step, step.cpu_seconds[phase] / step.phase_seconds[phase])
            for step in recent
            if phase in step.cpu_seconds and step.phase_seconds.get(phase)
        ]
        if points:
            figure.add_scatter(
                x=[number for number, _ in points],
                y=[cores for _, cores in points],
                name=phase,
                mode="lines" if len(points) > 1 else "markers",
                line={"color": palette.PHASE[phase], "width": 2},
                marker={"color": palette.PHASE[phase]},
                hovertemplate="step %{x}, " + phase + ": %{y:.2g} cores<extra></extra>",
            )
    if not figure.data:
        return empty("No CPU times were reported." if recent else "No step has finished yet.")
    figure.update_yaxes(title="cores", rangemode="tozero", nticks=5)
    _step_axis(figure, recent[0].step, recent[-1].step, 6)
    return frame(figure, legend=True)


def stalls_by_cause(steps: Sequence[StepReport]) -> go.Figure:
    """Mean stall seconds a step by cause, coloured by the phase that waited."""
    recent = list(steps)[-WINDOW:]
    totals: dict[tuple[str, str], float] = {}
    for row in (row for step in recent for row in step.stalls if row.seconds > 0):
        totals[row.cause, row.phase] = totals.get((row.cause, row.phase), 0.0) + row.seconds / len(recent)
    if not totals:
        return empty("No stalls: nothing waited." if recent else "No step has finished yet.")
    scale, unit = time_scale(max(totals.values()))
    causes = sorted({cause for cause, _ in totals}, key=lambda c: sum(v for (k, _), v in totals.items() if k == c))
    figure = go.Figure()
    for phase in (phase for phase in PHASES if any(p == phase for _, p in totals)):
        values = [totals.get((cause, phase), 0.0) for cause in causes]
        figure.add_bar(
            y=causes,
            x=[value * scale for value in values],
            name=phase,
            orientation="h",
            marker=hatched(palette.PHASE[phase]),
            customdata=[units.seconds(value) for value in values],
            hovertemplate="%{y} held up the " + phase + ": %{customdata} a step<extra></extra>",
        )
    ends = [sum(value for (cause, _), value in totals.items() if cause == name) for name in causes]
    _label_ends(figure, causes, [end * scale for end in ends], [units.seconds(end) for end in ends])
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_xaxes(title=f"{unit} a step", rangemode="tozero", nticks=5)
    figure.update_yaxes(type="category", showgrid=False)
    return frame(figure, legend=True)


def link_bytes(steps: Sequence[StepReport]) -> go.Figure:
    """Mean bytes a step over the link, by direction and content, coloured by the phase in which they moved."""
    recent = list(steps)[-WINDOW:]
    totals: dict[tuple[str, str], list[float]] = {}
    for row in (row for step in recent for row in step.links if row.bytes):
        entry = totals.setdefault((f"{row.direction} {row.content}", row.phase), [0.0, 0.0])
        entry[0] += row.bytes / len(recent)
        entry[1] += row.busy_seconds / len(recent)
    if not totals:
        return empty("Nothing has crossed the link." if recent else "No step has finished yet.")
    names = sorted({name for name, _ in totals}, reverse=True)
    scale, unit = byte_scale(max(moved for moved, _ in totals.values()))
    figure = go.Figure()
    for phase in (phase for phase in PHASES if any(p == phase for _, p in totals)):
        entries = [totals.get((name, phase), [0.0, 0.0]) for name in names]
        figure.add_bar(
            y=names,
            x=[moved * scale for moved, _ in entries],
            name=phase,
            orientation="h",
            marker={"color": palette.PHASE[phase]},
            customdata=[
                f"{units.nbytes(moved)} a step at {units.rate(moved / busy if busy > 0 else None)} while busy"
                for moved, busy in entries
            ],
            hovertemplate="%{y} in the " + phase + ": %{customdata}<extra></extra>",
        )
    ends = [sum(moved for (row, _), (moved, _) in totals.items() if row == name) for name in names]
    _label_ends(figure, names, [end * scale for end in ends], [units.nbytes(end) for end in ends])
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_xaxes(title=f"{unit} a step", rangemode="tozero", nticks=5)
    figure.update_yaxes(type="category", showgrid=False)
    return frame(figure, legend=True)


def series(points: tuple[list[int], list[float]], title: str, nothing: str, color: str) -> go.Figure:
    """One number of each step as a line: step numbers and values; `nothing` is said when there are none."""
    numbers, values = points
    if not values:
        return empty(nothing)
    stride = -(-len(values) // MAX_POINTS)
    figure = go.Figure()
    figure.add_scatter(
        x=numbers[::stride],
        y=values[::stride],
        mode="lines" if len(values) > 1 else "markers",
        line={"color": color, "width": 2},
        marker={"color": color},
        hovertemplate="step %{x}: %{y:.4g}<extra></extra>",
    )
    figure.update_yaxes(title=title, nticks=5)
    _step_axis(figure, numbers[0], numbers[-1], 6)
    return frame(figure)


def _step_axis(figure: go.Figure, first: int, last: int, ticks: int) -> None:
    """Whole steps, each named once however few there are."""
    figure.update_xaxes(title="step", tickformat="d", showgrid=False)
    figure.update_xaxes({"nticks": ticks} if last - first > ticks else {"dtick": 1})


def hatched(color: str) -> dict[str, object]:
    """The marker of a stall: stripes of `color` on a tint that shows on light and dark."""
    return {
        "color": "rgba(128,128,128,0.18)",
        "line": {"color": color, "width": 1},
        "pattern": {"shape": "/", "fgcolor": color, "size": 6, "solidity": 0.45, "fillmode": "overlay"},
    }


def _label_ends(figure: go.Figure, names: Sequence[str], ends: Sequence[float], labels: Sequence[str]) -> None:
    """Writes each row's total after its bar, with room for it."""
    figure.add_scatter(
        x=list(ends),
        y=list(names),
        text=[f" {label}" for label in labels],
        mode="text",
        textposition="middle right",
        textfont={"size": 11},
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
    )
    figure.update_xaxes(range=[0, max(ends) * 1.22])


def time_scale(longest: float) -> tuple[float, str]:
    """Factor and unit for an axis of durations up to `longest` seconds."""
    return (1.0, "s") if longest >= 2.0 else (1e3, "ms")


def byte_scale(largest: float) -> tuple[float, str]:
    """Factor and unit for an axis of sizes up to `largest` bytes."""
    return next(
        ((1 / size, unit) for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if largest >= size), (1.0, "B")
    )
