"""Charts of the page Run, built from steps. The Gantt chart is in `gantt.py`, memory in `memory_chart.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate import units
from tidegate.client.step_stats import WINDOW
from tidegate.dashboard.figures import chart_style
from tidegate.dashboard.figures.chart_style import Figure, Trace
from tidegate.dashboard.style import markup, palette
from tidegate.timeline.timeline import PHASES
from tidegate.wire.step import StepReport, moved_by

MAX_POINTS = 120
NO_STEP = "No step has finished yet."


@dataclass(frozen=True, slots=True)
class Mark:
    """An event at a step: a short name in the chart, and the lines of its hover text."""

    step: int
    name: str
    lines: tuple[str, ...]


def phase_history(steps: Sequence[StepReport], marks: Sequence[Mark] = ()) -> Figure:
    """Seconds of each phase, stacked, for each step; with a line at each change of knobs."""
    recent = list(steps)[-MAX_POINTS:]
    if not recent:
        return chart_style.empty(NO_STEP, chart_style.TALL)
    longest = max(sum(step.phase_seconds.values()) for step in recent)
    scale, unit = chart_style.time_scale(longest)
    top = longest * scale
    numbers = [step.step for step in recent]
    traces: list[Trace] = [
        {
            "type": "bar",
            "name": phase,
            "x": numbers,
            "y": chart_style.short(step.phase_seconds.get(phase, 0.0) * scale for step in recent),
            "marker": {"color": palette.PHASE[phase], "line": {"width": 0}},
            "hovertemplate": f"step %{{x}}, {phase}: %{{y:.3~r}} {unit}<extra></extra>",
        }
        for phase in PHASES
        if any(step.phase_seconds.get(phase) for step in recent)
    ]
    seen = [mark for mark in marks if numbers[0] <= mark.step <= numbers[-1]]
    if seen:
        traces.append(_names_of(seen, top * 1.10))
    return chart_style.figure(
        traces, chart_style.steps(numbers[0], numbers[-1], 8), chart_style.numbers(unit, range=[0, top * 1.14]),
        chart_style.TALL,
        barmode="stack", bargap=0.15 if len(recent) <= 60 else 0, shapes=[_line_at(mark, top * 1.07) for mark in seen],
    )  # fmt: skip


def _line_at(mark: Mark, top: float) -> dict[str, object]:
    """A dotted vertical line before the first step with the change of knobs."""
    line = {"color": palette.GREY, "width": 1.5, "dash": "dot"}
    return {"type": "line", "x0": mark.step - 0.5, "x1": mark.step - 0.5, "y0": 0, "y1": top, "line": line}


def _names_of(marks: Sequence[Mark], height: float) -> Trace:
    return {
        "type": "scatter", "mode": "markers+text", "showlegend": False, "cliponaxis": False,
        "x": [mark.step - 0.5 for mark in marks], "y": [height] * len(marks),
        "text": [markup.chart(mark.name) for mark in marks],
        "textposition": "middle right", "textfont": {"size": 10.5},
        "marker": {"symbol": "triangle-down", "size": 8, "color": palette.GREY},
        "customdata": ["<br>".join(map(markup.chart, mark.lines)) for mark in marks],
        "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip


def cpu_cores(steps: Sequence[StepReport]) -> Figure:
    """CPU seconds per second of each phase (the number of busy cores), for each step.

    Phases are identified by colour and hover text: a legend would take half of such a small chart.
    """
    recent = list(steps)[-MAX_POINTS:]
    traces = []
    for phase in PHASES:
        points = {
            step.step: step.cpu_seconds[phase] / step.phase_seconds[phase]
            for step in recent
            if phase in step.cpu_seconds and step.phase_seconds.get(phase)
        }
        if points:
            hover = f"step %{{x}}, {phase}: %{{y:.2g}} cores<extra></extra>"
            traces.append(_line(points, palette.PHASE[phase], hover, phase))
    if not traces:
        return chart_style.empty("No CPU times were reported." if recent else NO_STEP)
    axis = chart_style.steps(recent[0].step, recent[-1].step, 6)
    return chart_style.figure(traces, axis, chart_style.numbers(rangemode="tozero"))


def series(points: tuple[list[int], list[float]], nothing: str, color: str) -> Figure:
    """A line of one value for each step. points: step numbers and values. nothing: the message if there are none."""
    numbers, values = points
    if not values:
        return chart_style.empty(nothing)
    stride = -(-len(values) // MAX_POINTS)
    shown = dict(zip(numbers[::stride], values[::stride], strict=True))
    line = _line(shown, color, "step %{x}: %{y:.4g}<extra></extra>")
    return chart_style.figure([line], chart_style.steps(numbers[0], numbers[-1], 6), chart_style.numbers())


def _line(points: Mapping[int, float], color: str, hover: str, name: str = "") -> Trace:
    return {
        "type": "scatter", "mode": "lines" if len(points) > 1 else "markers", "name": name,
        "x": list(points), "y": chart_style.short(points.values()),
        "line": {"color": color, "width": 2}, "marker": {"color": color}, "hovertemplate": hover,
    }  # fmt: skip


def stalls_by_cause(steps: Sequence[StepReport]) -> Figure:
    """Mean stall seconds per step by cause, coloured by the phase that waited."""
    recent = list(steps)[-WINDOW:]
    totals: dict[tuple[str, str], float] = {}
    for row in (row for step in recent for row in step.stalls if row.seconds > 0):
        totals[row.cause, row.phase] = totals.get((row.cause, row.phase), 0.0) + row.seconds / len(recent)
    if not totals:
        return chart_style.empty("No stalls: nothing waited." if recent else NO_STEP)
    ends = _ends(totals)
    causes = sorted(ends, key=lambda cause: (ends[cause], cause))
    scale, unit = chart_style.time_scale(max(totals.values()))
    traces: list[Trace] = []
    for phase in _phases(totals):
        values = [totals.get((cause, phase), 0.0) for cause in causes]
        traces.append(
            _row_bars(causes, [value * scale for value in values], phase)
            | {
                "marker": chart_style.hatched(palette.PHASE[phase]),
                "customdata": [units.seconds(value) for value in values],
                "hovertemplate": f"%{{y}} held up the {phase}: %{{customdata}} a step<extra></extra>",
            }
        )
    labels = [units.seconds(ends[cause]) for cause in causes]
    return _rows(traces, causes, [ends[cause] * scale for cause in causes], labels, unit)


def link_bytes(steps: Sequence[StepReport]) -> Figure:
    """Mean bytes per step that are copied between host and device, by direction and content, coloured by the phase of
    the copy."""
    recent = list(steps)[-WINDOW:]
    rows = (row for step in recent for row in step.links if row.bytes)
    found = moved_by(rows, lambda row: (f"{row.direction} {row.content}", row.phase))
    moved = {name: nbytes / len(recent) for name, (nbytes, _) in found.items()}
    if not moved:
        return chart_style.empty("Nothing has crossed the link." if recent else NO_STEP)
    ends = _ends(moved)
    names = sorted(ends, reverse=True)
    scale, unit = chart_style.byte_scale(max(moved.values()))
    traces = [
        _row_bars(names, [moved.get((name, phase), 0.0) * scale for name in names], phase)
        | {
            "marker": {"color": palette.PHASE[phase]},
            "customdata": [_mean_and_speed(*found.get((name, phase), (0, 0.0)), len(recent)) for name in names],
            "hovertemplate": f"%{{y}} in the {phase}: %{{customdata}}<extra></extra>",
        }
        for phase in _phases(moved)
    ]
    return _rows(
        traces, names, [ends[name] * scale for name in names], [units.nbytes(ends[name]) for name in names], unit
    )


def _mean_and_speed(nbytes: int, seconds: float, num_steps: int) -> str:
    speed = units.rate(nbytes / seconds if seconds > 0 else None)
    return f"{units.nbytes(nbytes / num_steps)} a step at {speed} while busy"


def _ends(totals: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """The sum of each row over all phases. totals: values by name of the row and phase."""
    found: dict[str, float] = {}
    for (name, _), value in totals.items():
        found[name] = found.get(name, 0.0) + value
    return found


def _phases(totals: Mapping[tuple[str, str], float]) -> list[str]:
    there = {phase for _, phase in totals}
    return [phase for phase in PHASES if phase in there]


def _row_bars(names: Sequence[str], lengths: Sequence[float], phase: str) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": phase,
        "y": [markup.chart(name) for name in names],
        "x": chart_style.short(lengths),
    }


def _rows(
    traces: Sequence[Trace], names: Sequence[str], lengths: Sequence[float], labels: Sequence[str], unit: str
) -> Figure:
    """Stacked bars, one row for each name, with its total at the end."""
    return chart_style.figure(
        [*traces, chart_style.ends(names, lengths, labels)], chart_style.numbers(unit, range=[0, max(lengths) * 1.22]),
        chart_style.names(),
        legend=True, barmode="stack", bargap=0.35,
    )  # fmt: skip
