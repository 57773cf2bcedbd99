"""The last update, drawn: a bar for each op on its lane, and a hatched bar wherever nothing was being updated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import plotly.graph_objects as go

from tidegate.dashboard import palette, units
from tidegate.dashboard.charts import empty, frame, hatched, time_scale
from tidegate.plan.ops import CONTENT_OF, LANES, OpKind
from tidegate.timeline import Stall
from tidegate.wire import SpanRow, TimelineView

Scope = Literal["update", "step"]
HEIGHT = 330
LANE_HEIGHT = 14
"""For each lane of a storage path."""
MAX_BARS = 800
WAITS = "waits"


@dataclass(frozen=True, slots=True)
class Bar:
    """One op, or several neighbours of one kind that would be too thin to see."""

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


def window(view: TimelineView, scope: Scope) -> tuple[float, float]:
    """Seconds shown: the update (or all the step), from the timeline's origin."""
    rows = [row for row in view.phases if scope == "step" or row.phase == "update"]
    edges = [(row.start, row.end) for row in rows] or [(row.start, row.end) for row in view.spans] or [(0.0, 1e-3)]
    return min(start for start, _ in edges), max(end for _, end in edges)


def bars(rows: Sequence[SpanRow], finest: float) -> list[Bar]:
    """One bar a span; neighbours of one kind on a lane join where both bars and the gap are below `finest` seconds."""
    joined: list[Bar] = []
    by_lane: dict[str, list[SpanRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.start):
        by_lane[row.lane].append(row)
    for lane, spans in by_lane.items():
        current: Bar | None = None
        for row in spans:
            length = row.end - row.start
            if (
                current
                and current.kind == row.kind
                and row.start - current.end < finest
                and min(length, current.end - current.start) < finest
            ):
                current = Bar(
                    current.kind, lane, current.subgroup, None, current.start, max(current.end, row.end),
                    current.busy + length, current.nbytes + row.nbytes, current.numel + row.numel, current.num_ops + 1,
                )  # fmt: skip
                continue
            if current:
                joined.append(current)
            current = Bar(row.kind, lane, row.subgroup, row.slot, row.start, row.end, length, row.nbytes, row.numel)
        if current:
            joined.append(current)
    return joined


def gantt(view: TimelineView, stalls: Sequence[Stall], scope: Scope = "update") -> go.Figure:
    """Bars of the update, or of the whole step, by lane. Times are from the start of what is shown."""
    first, last = window(view, scope)
    shown = [row for row in view.spans if row.end > first and row.start < last]
    if not shown:
        return empty("The last step moved nothing and updated nothing here.", HEIGHT)
    scale, unit = time_scale(last - first)
    finest = 0.0 if len(shown) <= MAX_BARS else (last - first) / MAX_BARS
    figure = go.Figure()
    by_kind: dict[str, list[Bar]] = defaultdict(list)
    for bar in bars(shown, finest):
        by_kind[bar.kind].append(bar)
    for kind in [*palette.KIND, *sorted(set(by_kind) - set(palette.KIND))]:
        if by_kind.get(kind):
            figure.add_trace(_kind_trace(kind, by_kind[kind], first, scale))
    for cause in dict.fromkeys(stall.cause for stall in stalls):
        found = [s for s in stalls if s.cause == cause and s.end > first and s.start < last]
        if found:
            figure.add_trace(_stall_trace(cause, found, first, scale))
    if scope == "step":
        _mark_phases(figure, view, first, scale)
    figure.update_layout(barmode="overlay", bargap=0.22)
    figure.update_xaxes(
        title=f"{unit} since the {'update' if scope == 'update' else 'step'} began",
        range=[0, (last - first) * scale],
        nticks=12,
        showgrid=True,
    )
    lanes = [*(lane for lane in (*LANES[::-1],) if any(row.lane == lane for row in shown))]
    lanes = sorted({row.lane for row in shown} - set(LANES)) + lanes
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=[*lanes, WAITS], showgrid=False)
    frame(figure, HEIGHT + LANE_HEIGHT * max(0, len(lanes) - len(LANES)), legend=True)
    figure.update_layout(uirevision=scope, dragmode="zoom", legend={"itemwidth": 30, "tracegroupgap": 0})
    figure.update_yaxes(fixedrange=True)
    return figure


def _kind_trace(kind: str, found: Sequence[Bar], first: float, scale: float) -> go.Bar:
    return go.Bar(
        name=palette.KIND_NAME.get(kind, kind),
        orientation="h",
        y=[bar.lane for bar in found],
        base=[(bar.start - first) * scale for bar in found],
        x=[(bar.end - bar.start) * scale for bar in found],
        marker={
            "color": palette.KIND.get(kind, palette.GREY),
            "line": {"color": "rgba(128,128,128,0.55)", "width": 0.6 if len(found) < 200 else 0},
        },
        customdata=[_describe(bar, first) for bar in found],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _stall_trace(cause: str, found: Sequence[Stall], first: float, scale: float) -> go.Bar:
    return go.Bar(
        name=f"waits for {cause}",
        orientation="h",
        y=[WAITS for _ in found],
        base=[(stall.start - first) * scale for stall in found],
        x=[(stall.end - stall.start) * scale for stall in found],
        marker=hatched(palette.cause(cause)),
        customdata=[
            f"<b>waits for {cause}</b>, {units.seconds(s.end - s.start)}<br>"
            f"from {units.seconds(max(0.0, s.start - first))}: no update in progress"
            for s in found
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _describe(bar: Bar, first: float) -> str:
    what = palette.KIND_NAME.get(bar.kind, bar.kind)
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
    return "<br>".join(lines)


def _mark_phases(figure: go.Figure, view: TimelineView, first: float, scale: float) -> None:
    """A tint behind each phase, with its name inside at the top."""
    for row in view.phases:
        start, end = (row.start - first) * scale, (row.end - first) * scale
        figure.add_vrect(
            x0=start,
            x1=end,
            fillcolor=palette.PHASE.get(row.phase, palette.GREY),
            opacity=0.10,
            line_width=0,
            layer="below",
        )


def _content(kind: str) -> Literal["gradient", "weight", "state"] | None:
    return CONTENT_OF.get(OpKind(kind))
