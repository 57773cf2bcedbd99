"""Pages that are shown when there is no run: no daemon, no run yet, or an unknown run."""

from __future__ import annotations

import streamlit as st

from tidegate.dashboard.data.queries import Runs
from tidegate.dashboard.style import markup, palette


def refused(found: Runs) -> None:
    """Draws a banner for agents that the daemon refuses."""
    for sentence in found.refused:
        st.html(markup.banner(sentence, palette.LIVENESS["stale"]))


def nothing_yet(url: str, found: Runs) -> None:
    """Draws a page that says that there is no run yet, or no daemon, with the command that starts it."""
    if found.problem:
        st.html(markup.head("Tidegate", "no daemon", [url]) + markup.verdict("There is nothing to show yet."))
        st.html(markup.banner(f"{found.problem} This page connects by itself."))
        st.code("tidegate daemon", language="bash")
        return
    st.html(markup.head("Tidegate", "live", [url]) + markup.verdict("The daemon is up; no run has registered yet."))
    refused(found)
    st.html(markup.title("Try it", "a small training on an emulated device, no GPU needed"))
    st.code("tidegate demo", language="bash")
    st.html(markup.title("Watch your own training", "after the optimizer is made"))
    st.code(f'tidegate.attach(optimizer, model, run="my-run", daemon="{url}")', language="python")


def gone(run: str, known: list[str]) -> None:
    st.html(markup.head(run, "unknown", []) + markup.verdict(f"The daemon knows no run called {run}."))
    st.caption(markup.plain("It knows: " + ", ".join(known) + ". Choose one above."))
