"""A figure, on the page."""

from __future__ import annotations

import plotly.graph_objects as go
import streamlit as st

from tidegate.dashboard.plot import Figure

CONFIG = {"displayModeBar": False, "responsive": True}


def draw(figure: Figure, key: str) -> None:
    """Draws it, checked against Plotly's schema. A figure that has not changed is not drawn again."""
    st.plotly_chart(go.Figure(figure), key=key, config=CONFIG)
