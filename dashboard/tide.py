"""The tide chart: memory rising and falling with the phases, on the device above and in host memory below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tidegate.dashboard import palette, units
from tidegate.dashboard.charts import byte_scale, empty, frame
from tidegate.timeline import PHASES
from tidegate.wire import StepReport

STEPS = 12
HEIGHT = 300


@dataclass(frozen=True, slots=True)
class Wave:
    """The device's peak in one phase of one step. `at` is where the phase begins, as a step and its fraction."""

    step: int
    phase: str
    at: float
    width: float
    peak_bytes: int


def waves(steps: Sequence[StepReport]) -> list[Wave]:
    """Phases in their order, each as wide as its share of the step; those without a peak leave a gap."""
    found = []
    for step in steps:
        total = sum(step.phase_seconds.get(phase, 0.0) for phase in PHASES)
        at = float(step.step)
        for phase in PHASES if total > 0 else ():
            width = step.phase_seconds.get(phase, 0.0) / total
            if width > 0 and phase in step.device_memory_peak_bytes:
                found.append(Wave(step.step, phase, at, width, step.device_memory_peak_bytes[phase]))
            at += width
    return found


def tide(steps: Sequence[StepReport], capacity_bytes: int | None = None) -> go.Figure:
    """Of the newest STEPS steps. `capacity_bytes`: what the device has, drawn as a line where it is known."""
    recent = list(steps)[-STEPS:]
    found = waves(recent)
    kinds = [kind for kind in palette.HOST if any(step.host_memory_bytes.get(kind) for step in recent)]
    if not found and not kinds:
        return empty("No memory figures were reported." if recent else "No step has finished yet.", HEIGHT)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.0, row_heights=[0.58, 0.42])
    top = max([wave.peak_bytes for wave in found] + ([capacity_bytes] if capacity_bytes and found else []), default=0)
    _device(figure, found, *byte_scale(top), capacity_bytes)
    _host(figure, recent, kinds)
    figure.update_layout(barmode="stack", bargap=0)
    figure.update_xaxes(showgrid=False, tickformat="d", dtick=max(1, len(recent) // 8))
    figure.update_xaxes(title="step", row=2, col=1)
    frame(figure, HEIGHT, legend=True)
    figure.update_layout(hovermode="closest", legend={"traceorder": "normal"})
    return figure


def _device(figure: go.Figure, found: Sequence[Wave], scale: float, unit: str, capacity_bytes: int | None) -> None:
    for phase in PHASES:
        mine = [wave for wave in found if wave.phase == phase]
        if not mine:
            continue
        figure.add_bar(
            x=[wave.at for wave in mine],
            y=[wave.peak_bytes * scale for wave in mine],
            width=[wave.width for wave in mine],
            offset=0,
            name=phase,
            marker={"color": palette.PHASE[phase], "line": {"width": 0}},
            customdata=[f"step {wave.step}, {phase}: at most {units.nbytes(wave.peak_bytes)}" for wave in mine],
            hovertemplate="device, %{customdata}<extra></extra>",
            row=1,
            col=1,
        )
    if capacity_bytes and found:
        figure.add_hline(
            y=capacity_bytes * scale,
            line={"color": palette.GREY, "width": 1, "dash": "dash"},
            annotation={"text": f"{units.nbytes(capacity_bytes)} in all", "font": {"size": 10}, "yshift": -2},
            annotation_position="bottom right",
            row=1,
            col=1,
        )
    figure.update_yaxes(title=f"device, {unit}", rangemode="tozero", nticks=5, row=1, col=1)


def _host(figure: go.Figure, recent: Sequence[StepReport], kinds: Sequence[str]) -> None:
    scale, unit = byte_scale(max((sum(step.host_memory_bytes.values()) for step in recent), default=0))
    for kind in kinds:
        held = [step.host_memory_bytes.get(kind, 0) for step in recent]
        figure.add_bar(
            x=[step.step for step in recent],
            y=[value * scale for value in held],
            width=1.0,
            offset=0,
            name=f"host {kind}",
            marker={"color": palette.HOST[kind], "line": {"width": 0}},
            customdata=[f"step {s.step}, {kind}: {units.nbytes(v)}" for s, v in zip(recent, held, strict=True)],
            hovertemplate="host, %{customdata}<extra></extra>",
            row=2,
            col=1,
        )
    figure.update_yaxes(title=f"host, {unit}", autorange="reversed", rangemode="tozero", nticks=4, row=2, col=1)
