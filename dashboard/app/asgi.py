"""The ASGI application that `streamlit run` serves: the pages of `main.py` and the sign-in routes. Each request is
first checked by `RequestGuard`."""

from pathlib import Path

from starlette.middleware import Middleware
from streamlit.starlette import App

from tidegate.dashboard.server.request_guard import RequestGuard
from tidegate.dashboard.server.sign_in import ROUTES

app = App(Path(__file__).with_name("main.py"), routes=ROUTES, middleware=[Middleware(RequestGuard)])
