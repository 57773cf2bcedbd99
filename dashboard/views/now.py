"""Now: every run in a line, how it is and what holds it back."""

from __future__ import annotations

import time

import streamlit as st

from tidegate.dashboard import feed, links, markup, palette, units
from tidegate.dashboard.digest import digest, verdict
from tidegate.dashboard.parts import states
from tidegate.dashboard.place import Place, live
from tidegate.wire import RunView


@live
def now(place: Place) -> None:
    found = feed.runs(place.url)
    if not found.runs:
        states.nothing_yet(place.url, found)
        return
    for run in found.runs:
        _card(run)


def _card(run: RunView) -> None:
    last = next((rank.last_step for rank in run.ranks if rank.last_step), None)
    with st.container(border=True):
        links.link("run", run.run, run=run.run)
        st.html(
            markup.dot(run.liveness, palette.LIVENESS.get(run.liveness, palette.GREY))
            + markup.verdict(verdict(run, digest([last] if last else []), time.time()))
            + units.age(time.time() - run.last_seen)
        )
