"""The live view in a real browser."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from tidegate.client.discovery import find_token
from tidegate.dashboard import SIGN_IN_PATH, command, environment

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-domain-reliability",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-pings",
]
PATIENCE_MS = 90_000
"""Longest wait for something on a page, in milliseconds: two cores may be busy with other tests."""
DRAWN = """() => {
  const charts = [...document.querySelectorAll('[data-testid="stPlotlyChart"]')];
  return charts.every(chart => chart.querySelector('.main-svg'));
}"""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A real browser. Also sets the longest wait of `expect` to PATIENCE_MS, because its default, 5 s, is too short."""
    assert CHROMIUM.exists(), f"There is no {CHROMIUM}; as root, `make test` installs it (Debian package chromium)."
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), headless=True, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def sign_in(context: BrowserContext, url: str, token: str | None = None) -> None:
    """Lets a browser into the live view at `url`, as its user would with a token: by default the read token."""
    name, value = session(url, token)
    parts = urlsplit(url)
    context.add_cookies([{"name": name, "value": value, "url": f"{parts.scheme}://{parts.netloc}"}])


def session(url: str, token: str | None = None) -> tuple[str, str]:
    """A new session of the live view at `url`: its cookie's name and value."""
    parts = urlsplit(url)
    given = {"token": token or find_token("read") or ""}
    with httpx.Client(trust_env=False) as asker:
        answer = asker.post(f"{parts.scheme}://{parts.netloc}{SIGN_IN_PATH}", data=given)
    assert answer.status_code == 303, answer.text
    ((name, value),) = answer.cookies.items()
    return name, value


@contextlib.contextmanager
def open_page(
    browser: Browser, url: str, *, dark: bool = False, height: int = 800, token: str | None = None
) -> Iterator[tuple[Page, list[str]]]:
    """The page at 1280 pixels, drawn; and the console errors so far."""
    errors: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": height}, color_scheme="dark" if dark else "light")
    try:
        sign_in(context, url, token)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if is_ours(message) else None)
        page.goto(url)
        settle(page)
        yield page, errors
    finally:
        context.close()


def is_ours(message: ConsoleMessage) -> bool:
    """Errors, but for Streamlit in search of its server: of `/tune` it asks `/tune/_stcore/…`, then `/_stcore/…`."""
    return message.type == "error" and "/_stcore/" not in message.location["url"]


def settle(page: Page) -> None:
    """Waits until the page shows a run down to its last table, or says why not, and every chart is drawn."""
    expect(page.locator(".tg-verdict").first).to_be_visible()
    page.wait_for_function(DRAWN)
    expect(page.locator('[data-testid="stSkeleton"]')).to_have_count(0)


def screenshot(url: str, path: str | Path, *, dark: bool = False, full: bool = False, token: str | None = None) -> None:
    """Writes a PNG of the live view at 1280 × 800, or of all of it."""
    height = 2000 if full else 800
    with chromium() as browser, open_page(browser, url, dark=dark, height=height, token=token) as (page, _):
        page.wait_for_function(DRAWN)
        page.screenshot(path=str(path))


@contextlib.contextmanager
def serve(daemon_url: str) -> Iterator[str]:
    """The live view as users get it, on a free port; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        command(port, daemon_url), env=environment(daemon_url), stdout=sys.stderr, stderr=subprocess.STDOUT
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(15)
