"""What `streamlit run` serves: the pages of `main.py`, and the way in by a one-time code."""

from streamlit.starlette import App

from tidegate.dashboard.entrance import ROUTE

app = App("main.py", routes=[ROUTE])
