"""What `streamlit run` serves: the pages of `main.py`, and the way in, behind the guard."""

from starlette.middleware import Middleware
from streamlit.starlette import App

from tidegate.dashboard.entrance import ROUTES
from tidegate.dashboard.guard import Guard

app = App("main.py", routes=ROUTES, middleware=[Middleware(Guard)])
