"""Page Plan: the capacity planner, which predicts memory use and iteration time of a model on a machine."""

from __future__ import annotations

import streamlit as st

from tidegate.dashboard.session.page_context import PageContext, errors_shown, in_fragment
from tidegate.dashboard.style import snippets
from tidegate.dashboard.widgets import plan_answer, plan_form


def plan(_context: PageContext) -> None:
    """Draws the page. It needs no daemon and no run; the answer is computed again at each edit."""
    st.html(snippets.STYLE)
    _plan()


@in_fragment
def _plan() -> None:
    left, right = st.columns([3, 8], gap="medium")
    with left:
        asked, shape = plan_form.form()
    with right, errors_shown():
        plan_answer.answer(asked, shape)
