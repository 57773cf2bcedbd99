"""What `streamlit run` runs."""

from tidegate.dashboard.page import page

page()
