"""What `streamlit run` serves: the pages of `main.py`, and the way in by a one-time code, behind the guard."""

from starlette.middleware import Middleware
from streamlit.starlette import App

from tidegate.dashboard.entrance import ROUTE
from tidegate.dashboard.guard import Guard

app = App("main.py", routes=[ROUTE], middleware=[Middleware(Guard)])
