"""A page of the live view, run by Streamlit's own test harness."""

from __future__ import annotations

import functools
import re
from html import unescape
from pathlib import Path

from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from tests.dashboard import caches
from tidegate import dashboard

MAIN = Path(dashboard.__file__).with_name("app") / "main.py"

# Each AppTest looks through all installed packages for components, which takes longer than the page itself.
manifest_scanner.scan_component_manifests = functools.cache(manifest_scanner.scan_component_manifests)


def page(path: str = "run", **query: str) -> AppTest:
    """The page at `/<path>?<query>`, drawn."""
    app = AppTest.from_file(str(MAIN), default_timeout=20)
    app._page_hash = calc_hash(path)
    for name, value in query.items():
        app.query_params[name] = value
    return again(app)


def again(app: AppTest) -> AppTest:
    caches.expire()
    app.run()
    assert not app.exception
    return app


def text(app: AppTest) -> str:
    """All that the page says in its own HTML, without the tags."""
    bodies = " ".join(element.proto.body for element in app.get("html"))
    return unescape(re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", bodies, flags=re.DOTALL)))


def field(app: AppTest, label: str):  # type: ignore[no-untyped-def]
    return next(element for element in app.text_input if element.label.startswith(label))


def press(app: AppTest, label: str) -> AppTest:
    next(button for button in app.button if button.label == label).click()
    return again(app)
