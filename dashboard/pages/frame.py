"""Frame of all pages: navigation bar, pickers of run and rank, and the text shown while there is no run."""

from __future__ import annotations

import os
from functools import partial
from typing import Final

import streamlit as st

from tidegate.client.discovery import find_daemon
from tidegate.dashboard import URL_VARIABLE
from tidegate.dashboard.data import queries, triage
from tidegate.dashboard.pages.registry import SCREENS, Screen
from tidegate.dashboard.session import links
from tidegate.dashboard.session.page_context import PageContext, errors_shown, refreshed, refreshed_slowly
from tidegate.dashboard.style import markup
from tidegate.dashboard.widgets import states
from tidegate.wire.run import RunView

START: Final = "start"


def app() -> None:
    """Draws the page that the URL names. Live sections refresh by themselves, others only when the viewer acts."""
    st.set_page_config(page_title="Tidegate", page_icon="🌊", layout="wide", initial_sidebar_state="collapsed")
    st.html(markup.STYLE)
    pages = {
        screen.path: st.Page(partial(_draw, screen), title=screen.title, url_path=screen.path) for screen in SCREENS
    }
    links.register_pages(pages)
    start = st.Page(_start, title="Tidegate", url_path=START, default=True)
    st.navigation([start, *pages.values()], position="hidden").run()


def _start() -> None:
    """Redirects `/` to the first page, and `/?run=…` to the page of that run."""
    if run := st.query_params.get("run"):
        links.go_to("run", run=run)
    links.go_to(SCREENS[0].path)


@errors_shown()
def _draw(screen: Screen) -> None:
    url = os.environ.get(URL_VARIABLE) or find_daemon()
    found = queries.runs(url)
    run, rank = st.query_params.get("run", ""), 0
    bar = st.container(horizontal=True, key="bar", vertical_alignment="center", horizontal_alignment="distribute")
    left = bar.container(horizontal=True, width="content", key="links")
    if screen.about != "all" and found.runs:
        pickers = bar.container(horizontal=True, width="content", key="pickers")
        run = _pick_run(pickers, found.runs)
        view = next((view for view in found.runs if view.run == run), None)
        if view is not None and screen.about == "rank":
            rank = _pick_rank(pickers, view)
    with left:
        _links(screen, run, rank)
    if screen.about == "all":
        screen.draw(PageContext(url=url, run=run))
    elif not found.runs:
        _wait_for_a_run(url)
    elif run not in {view.run for view in found.runs}:
        states.gone(run, [view.run for view in found.runs])
        _watch_runs(url, _known(found.runs))
    else:
        _watch_runs(url, _known(found.runs))
        screen.draw(PageContext(url=url, run=run, rank=rank))


def _links(now: Screen, run: str, rank: int) -> None:
    """Draws a link to each page, with the present run and rank."""
    kept: dict[str, str | int] = {"run": run} if run else {}
    if rank:
        kept["rank"] = rank
    for screen in SCREENS:
        with st.container(key=f"link-{screen.path}{'-open' if screen is now else ''}", width="content"):
            links.page_link(screen.path, screen.title, **kept)


@refreshed
def _wait_for_a_run(url: str) -> None:
    found = queries.runs(url)
    if found.runs:
        st.rerun(scope="app")
    states.nothing_yet(url, found)


@refreshed_slowly
def _watch_runs(url: str, known: frozenset[tuple[str, int]]) -> None:
    """Draws the page again when there is a new run or rank, so that the pickers have it."""
    found = queries.runs(url)
    if not found.problem and _known(found.runs) - known:
        st.rerun(scope="app")


def _known(runs: tuple[RunView, ...]) -> frozenset[tuple[str, int]]:
    return frozenset((view.run, rank.rank) for view in runs for rank in view.ranks)


def _pick_run(where: st.delta_generator.DeltaGenerator, runs: tuple[RunView, ...]) -> str:
    """The run named in the query of the page's URL, else the first run of the list. Draws a picker if there are several
    runs."""
    names = [view.run for view in triage.ordered(runs)]
    asked = st.query_params.get("run")
    if len(names) == 1 and asked in (None, names[0]):
        return names[0]
    shown = runs[0].run if asked is None else asked
    chosen = where.selectbox(
        "Run", names, index=names.index(shown) if shown in names else None, label_visibility="collapsed",
        key=f"run_picker:{asked}", placeholder="Choose a run", width=210,
    )  # fmt: skip
    if chosen is not None and chosen != shown:
        st.query_params.from_dict({"run": chosen})
        return chosen
    return shown


def _pick_rank(where: st.delta_generator.DeltaGenerator, view: RunView) -> int:
    """The rank named in the query of the page's URL, else the lowest rank. Draws a picker if there are several
    ranks."""
    ranks = sorted(rank.rank for rank in view.ranks) or [0]
    asked = st.query_params.get("rank", "")
    shown = int(asked) if asked.isdecimal() and int(asked) in ranks else ranks[0]
    if len(ranks) < 2:
        return shown
    chosen = where.selectbox(
        "Rank", ranks, index=ranks.index(shown), label_visibility="collapsed", width=110,
        key=f"rank_picker:{view.run}:{asked}", format_func=lambda rank: f"rank {rank}",
    )  # fmt: skip
    if chosen != shown:
        st.query_params["rank"] = str(chosen)
    return int(chosen)
