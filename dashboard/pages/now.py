"""Page Now: running runs as cards, newest first; ended runs collapsed; and the most urgent suggested action."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import streamlit as st

from tidegate.dashboard.data import queries, read_cache, triage
from tidegate.dashboard.session import links
from tidegate.dashboard.session.page_context import PageContext, refreshed
from tidegate.dashboard.style import markup
from tidegate.dashboard.widgets import card, states
from tidegate.wire.run import RunView

CARDS: Final = 24
"""Largest number of cards; further runs are rows of a table below the cards."""
ENDED_SHOWN: Final = 3
"""Number of ended runs that are shown as cards while no run is running; the other ended runs are collapsed."""
MAX_ADVISED: Final = 3
"""Largest number of runs for which the page requests the model's advice."""
FILTER: Final = "now_filter"
PLACES: Final = {"run": "Open the run", "tune": "Tune it", "timeline": "Open its timeline", "alerts": "See alerts"}


def now(context: PageContext) -> None:
    if len(queries.runs(context.url).runs) > CARDS:
        st.text_input(
            "Filter", key=FILTER, placeholder="part of a run's name", label_visibility="collapsed", width=260,
            icon=":material/search:",
        )  # fmt: skip
    head = st.container()
    _runs(context)
    with head:
        _next(context)


@refreshed
def _runs(context: PageContext) -> None:
    """Draws all cards. They are drawn before the suggested action, for which the daemon may need some time."""
    found = queries.runs(context.url)
    if not found.runs:
        states.nothing_yet(context.url, found)
        return
    if found.problem:
        st.html(markup.banner(f"{found.problem} What follows is what was last known."))
    shown = _filtered(found.runs)
    if not shown:
        st.caption("No run has a name like that.")
    moment = time.time()
    cards, folded = triage.running(shown), triage.ended(shown)
    if not cards:
        cards, folded = folded[:ENDED_SHOWN], folded[ENDED_SHOWN:]
    with st.container(horizontal=True, key="cards"):
        for number, run in enumerate(cards[:CARDS]):
            card.card(number, run, moment, away=found.problem is not None)
    if len(cards) > CARDS:
        card.rows("more_runs", cards[CARDS:], moment, "More runs")
    if folded:
        with st.expander("Runs that ended", expanded=False):
            card.rows("ended_runs", folded, moment, triage.counted(folded))


def _filtered(runs: tuple[RunView, ...]) -> list[RunView]:
    wanted = str(st.session_state.get(FILTER, "")).strip().lower()
    return [run for run in runs if wanted in run.run.lower()]


@refreshed
def _next(context: PageContext) -> None:
    """Draws agents that the daemon refuses, the number of runs by liveness, and the suggested action."""
    found = queries.runs(context.url)
    if not found.runs:
        return
    states.refused(found)
    st.html(markup.title("Runs", triage.counted(found.runs)))
    if found.problem:
        return
    runs = triage.ordered(found.runs)
    fires = read_cache.FIRING.get(context.url)
    by_run = fires.value or {}
    moment = time.time()
    tasks = [task for run in runs if (task := triage.task(run, by_run.get(run.run, ()), moment))]
    tasks += [task for task in [triage.of_no_run(by_run.get(read_cache.NO_RUN, ()))] if task]
    first, unknown = _most_urgent(context.url, triage.sorted_tasks(tasks), {run.run: run.generation for run in runs})
    if fires.problem:
        unknown = [f"What fires is not known in full: {fires.problem}", *unknown]
    if first is None:
        if unknown or not found.refused:  # the banner of refused agents says what to do
            _nothing(unknown)
        return
    with st.container(horizontal=True, vertical_alignment="center", key="next"):
        how_bad = "lost" if first.urgency <= triage.FIRING else "stale"
        sentence = " ".join([first.sentence, *unknown])
        st.html(markup.advice(f"Next: {first.run or 'what concerns no run'}", sentence, how_bad))
        links.page_link(first.page, PLACES[first.page], run=first.run or runs[0].run)


def _nothing(unknown: list[str]) -> None:
    """Draws the note that there is nothing to do. `unknown`: sentences on what could not be checked; if there are any,
    the note says only that no task is known, and repeats them."""
    if unknown:
        st.html(markup.advice("Nothing to do is known.", " ".join(unknown), "stale"))
        return
    sentence = (
        "No run is silent, nothing fires, and no run loses much of its steps to waits or updates that knobs shorten."
    )
    st.html(markup.advice("Nothing to do.", sentence, "live"))


def _most_urgent(
    url: str, tasks: list[triage.Task], generations: Mapping[str, int]
) -> tuple[triage.Task | None, list[str]]:
    """The most urgent task with the model's advice, or None; and sentences on what could not be checked.

    Only the first `MAX_ADVISED` tasks are examined, because each may need advice, which the daemon computes.
    generations: the newest generation of each run.
    """
    unknown = []
    for task in tasks[:MAX_ADVISED]:
        advice = None
        if task.page == "tune":
            reading = read_cache.ADVICE.get(url, (task.run, generations[task.run]))
            advice = reading.value
            if reading.problem:
                unknown.append(f"What the model advises for {task.run} is not known: {reading.problem}")
        if (found := triage.with_advice(task, advice)) is not None:
            return found, unknown
    if tasks[MAX_ADVISED:]:
        unknown.append(f"Of {len(tasks)} runs that spend much of a step on the update, {MAX_ADVISED} were looked into.")
    return None, unknown
