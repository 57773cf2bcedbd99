"""Streamlit's entry script: draws the page of the address."""

from tidegate.dashboard.pages.frame import app

app()
