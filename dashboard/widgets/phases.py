"""Phases of a step: a table with a row for each phase, and the newest steps as stacked bars."""

from __future__ import annotations

from statistics import median

import streamlit as st

from tidegate import units
from tidegate.client.step_stats import WINDOW, StepSummary
from tidegate.dashboard.data import knob_edits
from tidegate.dashboard.data.queries import Snapshot
from tidegate.dashboard.figures import charts
from tidegate.dashboard.style import markup, palette
from tidegate.dashboard.widgets.figure import draw
from tidegate.wire.step import StepReport

MAX_MARKS = 8


def phases(snapshot: Snapshot, figures: StepSummary) -> None:
    st.html(markup.title("Phases", f"medians of {figures.step_count_text}") + _table(snapshot.steps, figures))


def history(snapshot: Snapshot) -> None:
    """Draws phase times over steps, with a line at each step where knobs changed."""
    st.html(markup.title("Phases, step by step", "lines: knobs changed"))
    draw(charts.phase_history(snapshot.steps, marks(snapshot)), "phase_history")


def marks(snapshot: Snapshot) -> list[charts.Mark]:
    """The marks for changes of knobs in the chart of phases: one for each generation that this rank has applied, at the
    first step with it. At most the newest `MAX_MARKS`, and none for the start-up settings."""
    rank, before = snapshot.rank.rank, {g.generation: g.knobs for g in snapshot.generations}
    found = []
    for made in snapshot.generations:
        step = made.applied.get(rank)
        if step is not None and made.generation > 0 and made.changes:
            change = knob_edits.describe(made.changes, before.get(made.generation - 1))
            said = f"generation {made.generation} by {made.author}, from step {step} on:"
            found.append(charts.Mark(step, f"{made.generation}", (said, change)))
    return found[-MAX_MARKS:]


def _table(steps: tuple[StepReport, ...], figures: StepSummary) -> str:
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
