"""Plan: does a model train on a machine, where will its state live, how long is an iteration, what would help."""

from __future__ import annotations

import streamlit as st

from tidegate.dashboard.session.page_context import Place, told
from tidegate.dashboard.style import snippets
from tidegate.dashboard.widgets import plan_answer, plan_form


def plan(_place: Place) -> None:
    """Needs no daemon and no run. The answer comes with each edit."""
    st.html(snippets.STYLE)
    _plan()


@st.fragment
def _plan() -> None:
    left, right = st.columns([3, 8], gap="medium")
    with left:
        asked, shape = plan_form.form()
    with right, told():
        plan_answer.answer(asked, shape)
