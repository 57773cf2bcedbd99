"""Now: every run as a card, the worst first, and the one thing to do next."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

import streamlit as st

from tidegate.dashboard import feed, links, markup, palette, urgency
from tidegate.dashboard.parts import card, states
from tidegate.dashboard.place import Place, live
from tidegate.wire import RunView

CARDS: Final = 24
"""More runs than that are rows of a table below."""
ASKED: Final = 3
FILTER: Final = "now_filter"
PLACES: Final = {"run": "Open the run", "tune": "Tune it", "timeline": "Open its timeline", "alerts": "See alerts"}


def now(place: Place) -> None:
    if len(feed.runs(place.url).runs) > CARDS:
        st.text_input(
            "Filter", key=FILTER, placeholder="part of a run's name", label_visibility="collapsed", width=260,
            icon=":material/search:",
        )  # fmt: skip
    head = st.container()
    _runs(place)
    with head:
        _next(place)


@live
def _runs(place: Place) -> None:
    """All cards. Drawn before the one thing to do next, for which the daemon may have to think."""
    found = feed.runs(place.url)
    if not found.runs:
        states.nothing_yet(place.url, found)
        return
    if found.problem:
        st.html(markup.banner(f"{found.problem} What follows is what was last known.", palette.LIVENESS["lost"]))
    shown = _filtered(found.runs)
    if not shown:
        st.caption("No run has a name like that.")
    moment = time.time()
    with st.container(horizontal=True, key="cards"):
        for number, run in enumerate(shown[:CARDS]):
            card.card(number, run, moment, away=found.problem is not None)
    if len(shown) > CARDS:
        card.rows(shown[CARDS:], moment)


def _filtered(runs: tuple[RunView, ...]) -> list[RunView]:
    wanted = str(st.session_state.get(FILTER, "")).strip().lower()
    return urgency.ordered([run for run in runs if wanted in run.run.lower()])


@live
def _next(place: Place) -> None:
    """How many there are of each kind, and what to do."""
    found = feed.runs(place.url)
    if not found.runs:
        return
    counts = Counter(run.liveness for run in found.runs)
    said = ", ".join(f"{count} {liveness}" for liveness, count in counts.most_common())
    st.html(markup.title("Runs", said))
    if found.problem:
        return
    firing = feed.alerts(place.url, [run.run for run in urgency.ordered(found.runs)[:CARDS]])
    moment = time.time()
    tasks = [task for run in found.runs if (task := urgency.task(run, firing.get(run.run, ()), moment))]
    first = _most_urgent(place.url, urgency.sorted_tasks(tasks))
    if first is None:
        sentence = "No run is silent, nothing fires, and no change of knobs is predicted to help."
        st.html(markup.advice("Nothing to do.", sentence, "live"))
        return
    with st.container(horizontal=True, vertical_alignment="center", key="next"):
        how_bad = "lost" if first.urgency < urgency.FULL else "stale"
        st.html(markup.advice(f"Next: {first.run}", first.sentence, how_bad))
        links.link(first.page, PLACES[first.page], run=first.run)


def _most_urgent(url: str, tasks: list[urgency.Task]) -> urgency.Task | None:
    """The first task that is one, with advice; the model is asked about a few runs at most."""
    for task in tasks[:ASKED]:
        advice = feed.advice(url, task.run) if task.page == "tune" else None
        if (found := urgency.with_advice(task, advice)) is not None:
            return found
    return None
