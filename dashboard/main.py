"""What `streamlit run` runs."""

from tidegate.dashboard.shell import app

app()
