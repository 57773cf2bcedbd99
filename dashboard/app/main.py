"""Entry script that Streamlit runs: draws the page that the URL in the browser names."""

from tidegate.dashboard.pages.frame import app

app()
