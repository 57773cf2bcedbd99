"""Where a step's time goes: a row for each phase, and the newest steps as stacked bars."""

from __future__ import annotations

from statistics import median

import streamlit as st

from tidegate.dashboard import charts, markup, palette, units
from tidegate.dashboard.digest import WINDOW, Digest
from tidegate.dashboard.feed import Snapshot
from tidegate.wire import StepReport

CONFIG = {"displayModeBar": False, "responsive": True}


def phases(snapshot: Snapshot, figures: Digest) -> None:
    st.html(markup.title("Phases", f"medians of {figures.steps} steps") + _table(snapshot.steps, figures))
    st.plotly_chart(charts.phase_history(snapshot.steps), key="phase_history", config=CONFIG)


def _table(steps: tuple[StepReport, ...], figures: Digest) -> str:
    recent = steps[-WINDOW:]
    last = recent[-1] if recent else None
    total = figures.step_seconds
    rows = []
    for phase, value in figures.phase_seconds.items():
        color = palette.PHASE[phase]
        peak = last.device_memory_peak_bytes.get(phase) if last else None
        rows.append(
            (
                markup.dot(phase, color),
                units.seconds(value),
                markup.bar(value / total, units.share(value / total), color),
                units.seconds(_median([step.exposed_seconds.get(phase) for step in recent])),
                units.seconds(_median([step.cpu_seconds.get(phase) for step in recent])),
                units.nbytes(peak),
            )
        )
    return markup.table(("phase", "time", "share", "exposed", "CPU time", "GPU peak"), rows)


def _median(values: list[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None
