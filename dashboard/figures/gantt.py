"""Gantt chart of one update: a bar for each op on its lane, and a hatched bar for each stall (no update op runs).

With a prediction each lane has two rows: measured bars above, predicted bars below in paler colours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tidegate import units
from tidegate.dashboard.figures import chart_style
from tidegate.dashboard.figures.chart_style import Figure, Trace
from tidegate.dashboard.style import markup, palette
from tidegate.plan.ops import LANES
from tidegate.timeline.stall_analysis import critical_path, stalls
from tidegate.timeline.timeline import Stall
from tidegate.wire.timeline import SpanRow, TimelineView
from tidegate.wire.translation import as_timeline

Scope = Literal["update", "step"]
HEIGHT: Final = 330
"""Height of an empty chart, in pixels."""
FRAME_HEIGHT: Final = 96
LANE_HEIGHT: Final = 36
MAX_BARS: Final = 800
WAITS: Final = "waits"
PREDICTED_OPACITY: Final = 0.5
MAX_PREDICTED_RATIO: Final = 2.0
"""Largest length of a prediction in the chart, as a multiple of the measured time. What is longer is cut, because the
measured bars would be too small to read."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar for one op, or for several neighbours of one kind that would be too thin to see."""

    kind: str
    lane: str
    subgroup: int
    slot: int | None
    start: float
    end: float
    busy: float
    nbytes: int
    numel: int
    num_ops: int = 1
    critical: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Layout of one timeline's bars. middle: position of the middle of each lane's row. height, opacity: of each bar.
    said: text with which the hover text of each bar begins."""

    middle: Mapping[str, float]
    height: float
    opacity: float
    said: str


def window(view: TimelineView, scope: Scope) -> tuple[float, float]:
    """Begin and end of the shown part (the update or the whole step), in seconds from the timeline's origin."""
    rows = [row for row in view.phases if scope == "step" or row.phase == "update"]
    edges = [(row.start, row.end) for row in rows] or [(row.start, row.end) for row in view.spans] or [(0.0, 1e-3)]
    return min(start for start, _ in edges), max(end for _, end in edges)


def bars(rows: Sequence[SpanRow], finest: float, critical: Collection[int] = ()) -> list[Bar]:
    """One bar for each span. Neighbours of one kind on a lane are joined if their gap and one of the two bars are
    shorter than `finest` seconds. critical: numbers of the ops on the critical path."""
    joined: list[Bar] = []
    for row in sorted(rows, key=lambda row: (row.lane, row.start)):
        bar = Bar(
            row.kind, row.lane, row.subgroup, row.slot, row.start, row.end, row.end - row.start, row.nbytes, row.numel,
            critical=row.op in critical,
        )  # fmt: skip
        before = joined[-1] if joined and (joined[-1].lane, joined[-1].kind) == (bar.lane, bar.kind) else None
        if before and bar.start - before.end < finest and min(bar.end - bar.start, before.end - before.start) < finest:
            joined[-1] = Bar(
                bar.kind, bar.lane, before.subgroup, None, before.start, max(before.end, bar.end),
                before.busy + bar.busy, before.nbytes + bar.nbytes, before.numel + bar.numel, before.num_ops + 1,
                before.critical or bar.critical,
            )  # fmt: skip
        else:
            joined.append(bar)
    return joined


def gantt(
    view: TimelineView,
    scope: Scope = "update",
    *,
    predicted: TimelineView | None = None,
    ink: str | None = None,
) -> Figure:
    """Gantt chart of the update, or of the whole step, by lane. Times are from the start of the shown part.

    ink: the colour in which the critical path is drawn; None leaves it out.
    """
    first, last = window(view, scope)
    if predicted is not None:
        last = max(last, min(window(predicted, scope)[1], first + MAX_PREDICTED_RATIO * (last - first)))
    shown = _within(view, first, last)
    if not shown:
        return chart_style.empty("This step moved nothing and updated nothing here.", HEIGHT)
    scale, unit = chart_style.time_scale(last - first)
    names = [lane for lane in LANES if any(row.lane == lane for row in shown)]
    names = [WAITS, *names, *sorted({row.lane for row in shown} - set(LANES))]
    above, below = _rows(names, predicted is not None)
    traces = _draw(view, above, first, last, scale, ink)
    if predicted is not None:
        traces += _draw(predicted, below, first, last, scale, None)
    drawn = chart_style.figure(
        traces,
        chart_style.numbers(unit, range=[0, (last - first) * scale], nticks=12, showgrid=True),
        {
            "tickvals": list(range(len(names))), "ticktext": [markup.chart(name) for name in names],
            "range": [len(names) - 0.5, -0.5],
            "automargin": True, "fixedrange": True, "showgrid": False, "zeroline": False, "tickfont": chart_style.TICKS,
        },
        FRAME_HEIGHT + LANE_HEIGHT * len(names),
        legend=True,
        barmode="overlay",
        dragmode="zoom",
        uirevision=scope,
    )  # fmt: skip
    drawn["layout"]["legend"] |= {"itemwidth": 30, "tracegroupgap": 0}
    if scope == "step":
        drawn["layout"] |= _tints(view, first, last, scale)
    return drawn


def _rows(names: Sequence[str], two: bool) -> tuple[Row, Row]:
    """The layouts of the measured bars (above) and the predicted bars in each lane; without a prediction the measured
    bars take the whole lane."""
    if not two:
        whole = Row({name: float(at) for at, name in enumerate(names)}, 0.78, 1.0, "")
        return whole, whole
    above = Row({name: at - 0.18 for at, name in enumerate(names)}, 0.46, 1.0, "")
    return above, Row({name: at + 0.24 for at, name in enumerate(names)}, 0.28, PREDICTED_OPACITY, "predicted: ")


def _within(view: TimelineView, first: float, last: float) -> list[SpanRow]:
    return [row for row in view.spans if row.end > first and row.start < last]


def _draw(view: TimelineView, row: Row, first: float, last: float, scale: float, ink: str | None) -> list[Trace]:
    timeline = as_timeline(view)
    critical = set(critical_path(timeline)) if ink else set()
    shown = [span for span in _within(view, first, last) if span.lane in row.middle]
    found = bars(shown, 0.0 if len(shown) <= MAX_BARS else (last - first) / MAX_BARS, critical)
    by_kind: dict[str, list[Bar]] = defaultdict(list)
    for bar in found:
        by_kind[bar.kind].append(bar)
    kinds = [*palette.KIND, *sorted(set(by_kind) - set(palette.KIND))]
    traces = [_kind_trace(kind, by_kind[kind], row, first, scale) for kind in kinds if by_kind.get(kind)]
    for cause, waits in _by_cause(stalls(timeline), first, last).items():
        traces.append(_stall_trace(cause, waits, row, first, scale))
    if ink:
        traces.append(_path([bar for bar in found if bar.critical], row, first, scale, ink))
    return traces


def _by_cause(found: Sequence[Stall], first: float, last: float) -> dict[str, list[Stall]]:
    by_cause: dict[str, list[Stall]] = defaultdict(list)
    for stall in found:
        if stall.end > first and stall.start < last:
            by_cause[stall.cause].append(stall)
    return by_cause


def _bar_trace(name: str, row: Row, lanes: Sequence[str], spans: Sequence[tuple[float, float]]) -> Trace:
    """A Plotly trace of horizontal bars. lanes: the lane of each bar. spans: start and end of each bar, in the unit of
    the axis."""
    label = markup.chart(name)
    return {
        "type": "bar", "orientation": "h", "name": label, "legendgroup": label, "showlegend": not row.said,
        "y": [row.middle[lane] for lane in lanes], "width": row.height, "opacity": row.opacity,
        "base": chart_style.short(start for start, _ in spans),
        "x": chart_style.short(end - start for start, end in spans),
        "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip


def _kind_trace(kind: str, found: Sequence[Bar], row: Row, first: float, scale: float) -> Trace:
    spans = [((bar.start - first) * scale, (bar.end - first) * scale) for bar in found]
    edge = {"color": "rgba(128,128,128,0.55)", "width": 0.6 if len(found) < 200 else 0}
    return _bar_trace(palette.KIND_NAME.get(kind, kind), row, [bar.lane for bar in found], spans) | {
        "marker": {"color": palette.KIND.get(kind, palette.GREY), "line": edge},
        "customdata": [row.said + _describe(bar, first) for bar in found],
    }


def _stall_trace(cause: str, found: Sequence[Stall], row: Row, first: float, scale: float) -> Trace:
    name = f"waits for {cause}"
    spans = [((stall.start - first) * scale, (stall.end - first) * scale) for stall in found]
    return _bar_trace(name, row, [WAITS] * len(found), spans) | {
        "marker": chart_style.hatched(palette.cause(cause)),
        "customdata": [
            f"{row.said}<b>{markup.chart(name)}</b>, {units.seconds(s.end - s.start)}<br>"
            f"from {units.seconds(max(0.0, s.start - first))}: no update in progress"
            for s in found
        ],
    }


def _path(found: Sequence[Bar], row: Row, first: float, scale: float, ink: str) -> Trace:
    """The critical path: a line through the bars that decided when the update ended."""
    x: list[float] = []
    y: list[float] = []
    for bar in sorted(found, key=lambda bar: (bar.start, bar.end)):
        x += [(bar.start - first) * scale, (bar.end - first) * scale]
        y += [row.middle[bar.lane]] * 2
    return {
        "type": "scatter", "mode": "lines", "name": "critical path", "x": chart_style.short(x), "y": y,
        "line": {"color": ink, "width": 2, "shape": "linear"}, "hoverinfo": "skip",
    }  # fmt: skip


def _describe(bar: Bar, first: float) -> str:
    what = markup.chart(palette.KIND_NAME.get(bar.kind, bar.kind))
    which = (
        f"{bar.num_ops} ops" if bar.num_ops > 1 else "all subgroups" if bar.subgroup < 0 else f"subgroup {bar.subgroup}"
    )
    slot = "" if bar.slot is None else f", slot {bar.slot}"
    start = bar.start - first
    when = f"{units.seconds(start)} in" if start >= 0 else f"{units.seconds(-start)} before the update"
    lines = [f"<b>{what}</b> · {which}{slot}", f"{units.seconds(bar.end - bar.start)}, begins {when}"]
    busy = max(bar.busy, 1e-12)
    if bar.nbytes:
        lines.append(f"{units.nbytes(bar.nbytes)} at {units.rate(bar.nbytes / busy)}")
    if bar.numel:
        lines.append(f"{units.count(bar.numel)} parameters at {units.count(bar.numel / busy)}/s")
    if bar.critical:
        lines.append("on the critical path")
    return "<br>".join(lines)


def _tints(view: TimelineView, first: float, last: float, scale: float) -> dict[str, list[dict[str, object]]]:
    """Plotly's layout entries `shapes` and `annotations` for the phases: a tint behind each phase, and its name at the
    bottom if the phase is wide enough."""
    edges = [(row, (row.start - first) * scale, (row.end - first) * scale) for row in view.phases]
    tints: list[dict[str, object]] = [
        {
            "type": "rect", "layer": "below", "x0": start, "x1": end, "yref": "paper", "y0": 0, "y1": 1,
            "fillcolor": palette.PHASE.get(row.phase, palette.GREY), "opacity": 0.13, "line": {"width": 0},
        }
        for row, start, end in edges
    ]  # fmt: skip
    names: list[dict[str, object]] = [
        {
            "text": markup.chart(row.phase), "showarrow": False, "font": {"size": 10}, "x": start, "xanchor": "left",
            "yref": "paper", "y": 0, "yanchor": "bottom",
        }
        for row, start, _ in edges
        if row.end - row.start > 0.06 * (last - first)
    ]  # fmt: skip
    return {"shapes": tints, "annotations": names}
