"""Stalls of the update by cause, and the division of updates between device and CPU."""

from __future__ import annotations

import streamlit as st

from tidegate import units
from tidegate.client.step_stats import StepSummary
from tidegate.dashboard.data.queries import Snapshot
from tidegate.dashboard.figures import charts
from tidegate.dashboard.style import markup, palette
from tidegate.dashboard.widgets.figure import draw
from tidegate.dashboard.widgets.header import prediction


def waits(snapshot: Snapshot, figures: StepSummary) -> None:
    total = sum(figures.stall_share.values())
    st.html(markup.title("Stalls by cause", f"{units.share(total)} of the update, mean of {figures.step_count_text}"))
    draw(charts.stalls_by_cause(snapshot.steps), "stalls")


def division(snapshot: Snapshot, figures: StepSummary) -> None:
    """Draws tables of the last step: parameters updated by CPU and device, and subgroups by residence. Below them, the
    simulator's prediction of the update time compared with the measurement."""
    last = snapshot.steps[-1] if snapshot.steps else None
    rows = [*_shares("updated by", "params", last.update_params if last else {})]
    rows += _shares("state on", "subgroups", last.subgroups if last else {})
    note = prediction(snapshot.rank.predicted_update_seconds, figures.phase_seconds.get("update"))
    st.html(
        markup.title("Division of work", "last step")
        + markup.table(("", "", ""), rows)
        + markup.title("Update", f"{note} (median of {figures.step_count_text})")
    )


def _shares(what: str, unit: str, counts: dict[str, int]) -> list[tuple[str, str, str]]:
    total = sum(counts.values())
    return [
        (
            markup.dot(f"{what} {place}", palette.residence(place)),
            f"{units.count(number)} {unit if number != 1 else unit.removesuffix('s')}",
            markup.bar(number / total, units.share(number / total), palette.residence(place)) if total else units.NONE,
        )
        for place, number in sorted(counts.items(), reverse=True)
    ]
