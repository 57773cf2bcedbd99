"""The live view: one page, put together from its parts."""

from __future__ import annotations

import os

import streamlit as st

from tidegate.client import find_daemon
from tidegate.dashboard import URL_VARIABLE, feed, markup
from tidegate.dashboard.digest import digest
from tidegate.dashboard.views import alerts, control, form, header, phases, resources, states, storage, update
from tidegate.wire import RunView

REFRESH_SECONDS = 1.5


def page() -> None:
    """Draws everything. Live parts refresh themselves; pickers and the form run only when the viewer touches them."""
    st.set_page_config(page_title="Tidegate", page_icon="🌊", layout="wide", initial_sidebar_state="collapsed")
    st.html(markup.STYLE)
    url = os.environ.get(URL_VARIABLE) or find_daemon()
    found = feed.runs(url)
    if not found.runs:
        _wait_for_a_run(url)
        return
    pickers = st.container(horizontal=True, width="content", key="pickers")
    with pickers:
        run = _pick_run(found.runs)
    view = next((view for view in found.runs if view.run == run), None)
    if view is None:
        states.gone(run, [known.run for known in found.runs])
        return
    with pickers:
        rank = _pick_rank(view)
    _watch_runs(url, frozenset((known.run, rank.rank) for known in found.runs for rank in known.ranks))
    _live(url, run, rank)
    left, right = st.columns([2, 3], gap="medium")
    with right:
        _live_knobs(url, run, rank)
    with left:
        _form(url, run, rank)


@st.fragment(run_every=REFRESH_SECONDS)
def _wait_for_a_run(url: str) -> None:
    found = feed.runs(url)
    if found.runs:
        st.rerun(scope="app")
    states.nothing_yet(url, found)


@st.fragment(run_every=REFRESH_SECONDS)
def _watch_runs(url: str, known: frozenset[tuple[str, int]]) -> None:
    """A new run or rank needs the pickers drawn again."""
    found = feed.runs(url)
    if not found.problem and {(view.run, rank.rank) for view in found.runs for rank in view.ranks} - known:
        st.rerun(scope="app")


@st.fragment(run_every=REFRESH_SECONDS)
def _live(url: str, run: str, rank: int) -> None:
    look = feed.look(url, run, rank)
    snapshot = look.snapshot
    if snapshot is None:
        st.html(markup.head(run, "unknown", [url]) + markup.verdict(look.problem or "Nothing has been read yet."))
        return
    figures = digest(snapshot.steps)
    header.header(look, snapshot, figures)
    left, right = st.columns([9, 20], gap="medium")
    with left:
        phases.phases(snapshot, figures)
    with right:
        update.last_update(snapshot)
    first, second, third = st.columns(3, gap="medium")
    with first:
        update.waits(snapshot, figures)
    with second:
        update.lanes(snapshot)
    with third:
        update.division(snapshot, figures)
    storage.paths(snapshot, figures)
    first, second, third = st.columns(3, gap="medium")
    with first:
        resources.links(snapshot)
    with second:
        resources.link_speeds(snapshot, figures)
    with third:
        resources.memory(snapshot)
    first, second, third = st.columns(3, gap="medium")
    with first:
        resources.loss(snapshot)
    with second:
        resources.grad_norm(snapshot)
    with third:
        resources.tokens(snapshot)


@st.fragment(run_every=REFRESH_SECONDS)
def _live_knobs(url: str, run: str, rank: int) -> None:
    snapshot = feed.look(url, run, rank).snapshot
    if snapshot is not None:
        alerts.alerts(snapshot)
        control.knobs(snapshot)
        control.history(snapshot)


def _form(url: str, run: str, rank: int) -> None:
    snapshot = feed.look(url, run, rank).snapshot
    if snapshot is not None:
        form.form(url, snapshot.knobs)


def _pick_run(runs: tuple[RunView, ...]) -> str:
    """The run of ?run=, else the one heard of last; a picker when there are several."""
    names = sorted(view.run for view in runs)
    asked = st.query_params.get("run")
    if len(names) == 1 and asked in (None, names[0]):
        return names[0]
    default = asked if asked in names else runs[0].run if asked is None else None
    chosen = st.selectbox(
        "Run", names, index=names.index(default) if default else None, label_visibility="collapsed",
        key="run_picker", placeholder="Choose a run", width=230,
    )  # fmt: skip
    if chosen is None:
        return asked or names[0]
    if chosen != asked:
        st.query_params["run"] = chosen
    return chosen


def _pick_rank(view: RunView) -> int:
    """Rank 0, or the first there is; a picker when there are several."""
    ranks = sorted(rank.rank for rank in view.ranks)
    if len(ranks) < 2:
        return ranks[0] if ranks else 0
    chosen = st.selectbox(
        "Rank", ranks, label_visibility="collapsed", key=f"rank_picker:{view.run}", width=120,
        format_func=lambda rank: f"rank {rank}",
    )  # fmt: skip
    return int(chosen)
