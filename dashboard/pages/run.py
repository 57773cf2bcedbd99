"""Page Run: charts of time, transfers and memory of one rank."""

from __future__ import annotations

import streamlit as st

from tidegate.client.step_stats import summarize
from tidegate.dashboard.data import queries
from tidegate.dashboard.session.page_context import PageContext, refreshed, refreshed_slowly
from tidegate.dashboard.widgets import header, phases, resources, storage, update


def run(context: PageContext) -> None:
    _first_screen(context)
    _below(context)


@refreshed
def _first_screen(context: PageContext) -> None:
    snapshot = header.header(context, key_figures=True).value
    if snapshot is None:
        return
    figures = summarize(snapshot.steps)
    left, right = st.columns([9, 16], gap="medium")
    with left:
        phases.phases(snapshot, figures)
        update.division(snapshot, figures)
    with right:
        phases.history(snapshot)
        update.waits(snapshot, figures)


@refreshed_slowly
def _below(context: PageContext) -> None:
    snapshot = queries.snapshot_reading(context.url, context.run, context.rank).value
    if snapshot is None:
        return
    figures = summarize(snapshot.steps)
    left, right = st.columns([16, 9], gap="medium")
    with left:
        resources.memory(snapshot)
    with right:
        resources.link_speeds(snapshot, figures)
        resources.links(snapshot)
    storage.paths(snapshot, figures)
    for column, draw in zip(
        st.columns(4, gap="medium"), (resources.cpu, resources.loss, resources.grad_norm, resources.tokens), strict=True
    ):
        with column:
            draw(snapshot)
