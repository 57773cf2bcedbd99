"""Draws a Plotly figure on the page, in the viewer's theme."""

from __future__ import annotations

import plotly.graph_objects as go
import streamlit as st

from tidegate.dashboard.figures import chart_style
from tidegate.dashboard.style.palette import Theme

CONFIG = {"displayModeBar": False, "responsive": True}


def draw(figure: chart_style.Figure, key: str) -> None:
    """Draws the figure in the viewer's theme, validated with Plotly's schema. An unchanged figure is not redrawn."""
    st.plotly_chart(go.Figure(chart_style.themed(figure, theme())), key=key, config=CONFIG, theme=None)


def theme() -> Theme:
    """The viewer's theme."""
    return "dark" if st.context.theme.type == "dark" else "light"
