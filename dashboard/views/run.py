"""Run: where the time, the bytes and the memory of one rank go."""

from __future__ import annotations

import streamlit as st

from tidegate.dashboard import feed
from tidegate.dashboard.digest import digest
from tidegate.dashboard.parts import header, phases, resources, storage, update
from tidegate.dashboard.place import Place, live


@live
def run(place: Place) -> None:
    look = feed.look(place.url, place.run, place.rank)
    snapshot = look.snapshot
    if snapshot is None:
        header.unread(place, look)
        return
    figures = digest(snapshot.steps)
    header.header(look, snapshot, figures)
    left, right = st.columns([9, 20], gap="medium")
    with left:
        phases.phases(snapshot, figures)
    with right:
        resources.links(snapshot)
        resources.link_speeds(snapshot, figures)
    storage.paths(snapshot, figures)
    first, second, third = st.columns(3, gap="medium")
    with first:
        update.waits(snapshot, figures)
    with second:
        resources.memory(snapshot)
    with third:
        update.division(snapshot, figures)
    first, second, third = st.columns(3, gap="medium")
    with first:
        resources.loss(snapshot)
    with second:
        resources.grad_norm(snapshot)
    with third:
        resources.tokens(snapshot)
