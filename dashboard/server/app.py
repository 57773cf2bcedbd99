"""What `streamlit run` serves: the pages of `main.py`, and the way in, behind the guard."""

from pathlib import Path

from starlette.middleware import Middleware
from streamlit.starlette import App

from tidegate.dashboard.server.request_guard import Guard
from tidegate.dashboard.server.sign_in import ROUTES

app = App(Path(__file__).parents[1] / "main.py", routes=ROUTES, middleware=[Middleware(Guard)])
