"""What `streamlit run` runs."""

from tidegate.dashboard.pages.frame import app

app()
