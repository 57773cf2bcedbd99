"""Memory chart: peaks of device memory by phase above, host memory of the engine below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate import units
from tidegate.dashboard.figures import chart_style
from tidegate.dashboard.figures.chart_style import Axis, Figure, Trace
from tidegate.dashboard.style import palette
from tidegate.timeline.timeline import PHASES
from tidegate.wire.step import StepReport

STEPS = 12
HEIGHT = 360
DEVICE_HOST_BORDER = 0.42
"""Height of the border between the device part (above) and the host part (below) of the chart, as a share of the
chart's height."""


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """Peak of device memory in one phase of one step. `at`: begin of the phase, as a step number with a fraction.
    `width`: the phase's share of the step's time."""

    step: int
    phase: str
    at: float
    width: float
    peak_bytes: int


def phase_peaks(steps: Sequence[StepReport]) -> list[PhasePeak]:
    """The phases in order, each as wide as its share of the step; a phase without a peak leaves a gap."""
    found = []
    for step in steps:
        total = sum(step.phase_seconds.get(phase, 0.0) for phase in PHASES)
        at = float(step.step)
        for phase in PHASES if total > 0 else ():
            width = step.phase_seconds.get(phase, 0.0) / total
            if width > 0 and phase in step.device_memory_peak_bytes:
                found.append(PhasePeak(step.step, phase, at, width, step.device_memory_peak_bytes[phase]))
            at += width
    return found


def memory_figure(steps: Sequence[StepReport], capacity_bytes: int | None = None) -> Figure:
    """The memory chart of the newest STEPS steps. `capacity_bytes`: size of device memory, drawn as a line if known."""
    recent = list(steps)[-STEPS:]
    found = phase_peaks(recent)
    kinds = [kind for kind in palette.HOST if any(step.host_memory_bytes.get(kind) for step in recent)]
    if not found and not kinds:
        return chart_style.empty("No memory figures were reported." if recent else "No step has finished yet.", HEIGHT)
    capacity = capacity_bytes if capacity_bytes and found else None
    above, device = chart_style.byte_scale(max([wave.peak_bytes for wave in found] + [capacity or 0]))
    below, host = chart_style.byte_scale(max((sum(step.host_memory_bytes.values()) for step in recent), default=0))
    drawn = chart_style.figure(
        [*_device(found, above, device), *_host(recent, kinds, below, host)],
        _steps(recent, anchor="y", showticklabels=False),
        chart_style.numbers(device, rangemode="tozero", domain=[DEVICE_HOST_BORDER, 1], anchor="x"),
        HEIGHT,
        legend=True,
        xaxis2=_steps(recent, anchor="y2"),
        yaxis2=chart_style.numbers(
            host,
            autorange="reversed",
            rangemode="tozero",
            nticks=4,
            domain=[0, DEVICE_HOST_BORDER],
            anchor="x2",
            showticksuffix="first",
        ),
        barmode="stack",
        bargap=0,
        hovermode="closest",
        annotations=[_side("device", (DEVICE_HOST_BORDER + 1) / 2), _side("host", DEVICE_HOST_BORDER / 2)],
    )
    if capacity is not None:
        _mark_capacity(drawn, capacity, above)
    drawn["layout"]["legend"]["traceorder"] = "normal"
    return drawn


def _steps(recent: Sequence[StepReport], **more: object) -> Axis:
    """The axis from the begin of the first step to the end of the last; only some steps have labels."""
    first, last = recent[0].step, recent[-1].step
    spread = {"range": [first, last + 1], "tick0": first, "dtick": max(1, len(recent) // 8)}
    return chart_style.steps(first, last, STEPS) | spread | more


def _side(name: str, height: float) -> dict[str, object]:
    """The label of the device or host part, at the left edge."""
    return {
        "text": name, "textangle": -90, "showarrow": False, "font": {"size": 10.5, "color": palette.GREY},
        "xref": "paper", "x": 0, "xanchor": "right", "xshift": -38, "yref": "paper", "y": height, "yanchor": "middle",
    }  # fmt: skip


def _device(found: Sequence[PhasePeak], scale: float, unit: str) -> list[Trace]:
    traces: list[Trace] = []
    for phase in PHASES:
        mine = [wave for wave in found if wave.phase == phase]
        if mine:
            traces.append(
                {
                    "type": "bar",
                    "name": phase,
                    "x": [round(wave.at, 4) for wave in mine],
                    "y": chart_style.short(wave.peak_bytes * scale for wave in mine),
                    "width": chart_style.short(wave.width for wave in mine),
                    "offset": 0,
                    "marker": {"color": palette.PHASE[phase], "line": {"width": 0}},
                    "customdata": [wave.step for wave in mine],
                    "hovertemplate": f"device, step %{{customdata}}, {phase}: at most %{{y:.3~r}} {unit}"
                    "<extra></extra>",
                }
            )
    return traces


def _host(recent: Sequence[StepReport], kinds: Sequence[str], scale: float, unit: str) -> list[Trace]:
    return [
        {
            "type": "bar",
            "name": f"host {kind}",
            "x": [step.step for step in recent],
            "y": chart_style.short(step.host_memory_bytes.get(kind, 0) * scale for step in recent),
            "width": 1.0,
            "offset": 0,
            "marker": {"color": palette.HOST[kind], "line": {"width": 0}},
            "hovertemplate": f"host, step %{{x}}, {kind}: %{{y:.3~r}} {unit}<extra></extra>",
            "xaxis": "x2",
            "yaxis": "y2",
        }
        for kind in kinds
    ]


def _mark_capacity(drawn: Figure, capacity_bytes: int, scale: float) -> None:
    """Draws the size of device memory as a dashed horizontal line."""
    at = capacity_bytes * scale
    drawn["layout"]["shapes"] = [
        {
            "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at,
            "line": {"color": palette.GREY, "width": 1, "dash": "dash"},
        }
    ]  # fmt: skip
    drawn["layout"]["annotations"].append(
        {
            "text": f"{units.nbytes(capacity_bytes)} in all", "showarrow": False, "font": {"size": 10},
            "xref": "paper", "x": 1, "xanchor": "right", "y": at, "yanchor": "top",
        }
    )  # fmt: skip
