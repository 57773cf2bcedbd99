"""Card of one run: its liveness, time per step, a sentence on how its time is used (the verdict), and the age of the
data. Also a table for the runs that get no card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import streamlit as st

from tidegate import units
from tidegate.client.step_stats import StepSummary, last_figures, verdict
from tidegate.dashboard.session import links
from tidegate.dashboard.style import markup, palette
from tidegate.dashboard.widgets.header import EMULATED
from tidegate.wire.run import RunView

DRAWN: Final = "drawn:"
"""Prefix of the session keys that store, for each table of runs, the run names in the order of the last drawing. A
click gives only a row number, and this list says which run it was."""


def card(number: int, run: RunView, now: float, *, away: bool) -> None:
    """Draws the card of a run. number: the card's position on the page. now: time in seconds since the epoch. away:
    True if the daemon cannot be reached; the card then shows the liveness as unknown."""
    figures = last_figures(run)
    liveness = "unknown" if away else run.liveness
    with st.container(border=True, key=f"card-{number}"):
        with st.container(horizontal=True, vertical_alignment="center", key=f"card-head-{number}"):
            links.page_link("run", run.run, run=run.run)
            st.html(markup.pill(liveness))
        st.html(_figures(run, figures, now) + markup.verdict(verdict(run, figures, now)) + _phases(figures))


def _figures(run: RunView, figures: StepSummary, now: float) -> str:
    none = "steps not kept" if run.step else "no step yet"
    pace = f"{units.seconds(figures.step_seconds)}/step" if figures.steps else none
    ranks = f"{len(run.ranks)} of {run.world_size} ranks" if run.world_size > 1 else "1 rank"
    device = "emulated" if run.device_kind == "emulated" else "CUDA"
    details = [f"step {units.integer(run.step)}", ranks, device, f"last message {units.age(now - run.last_seen)} ago"]
    return markup.pace(pace, details, EMULATED if run.device_kind == "emulated" else "")


def _phases(figures: StepSummary) -> str:
    """The phases of the last step as a stacked bar."""
    total = figures.step_seconds
    if total <= 0:
        return ""
    parts = [(phase, value / total, palette.PHASE[phase]) for phase, value in figures.phase_seconds.items()]
    return markup.stack([(f"{name} {units.share(share)}", share, color) for name, share, color in parts])


def rows(key: str, runs: Sequence[RunView], now: float, title: str) -> None:
    """Draws runs without a card as a table; a click on a row opens the run."""
    st.html(markup.title(title, "click a row to open it"))
    table = []
    for run in runs:
        figures = last_figures(run)
        table.append(
            {
                "run": run.run,
                "state": run.liveness,
                "pace": f"{units.seconds(figures.step_seconds)}/step" if figures.steps else units.NONE,
                "verdict": verdict(run, figures, now),
                "step": run.step,
                "last message": f"{units.age(now - run.last_seen)} ago",
            }
        )
    # The row number of a click refers to the table that was drawn last; the order may have changed since.
    drawn: list[str] = st.session_state.get(DRAWN + key, [])
    st.session_state[DRAWN + key] = [run.run for run in runs]
    chosen = st.dataframe(
        table, key=key, on_select="rerun", selection_mode="single-row", hide_index=True,
        column_config={"verdict": st.column_config.TextColumn(width="large")},
    )  # fmt: skip
    picked = chosen["selection"]["rows"]
    if picked and picked[0] < len(drawn):
        links.go_to("run", run=drawn[picked[0]])
