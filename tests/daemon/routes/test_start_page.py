"""What a person sees who opens the daemon's address in a browser: what it is, and its API to read and to try."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Request, expect

from tests.daemon.live import Agent, Daemon, new_run
from tests.dashboard.browser import PATIENCE_MS, chromium


def test_the_address_itself_says_what_this_is_and_where_to_go(daemon: Daemon) -> None:
    page = daemon.http("GET", "/", None, headers={"Accept": "text/html"})
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    for told in ("Tidegate", 'href="/docs"', "tidegate dashboard", "operate.token"):
        assert told in page.text
    plain = daemon.http("GET", "/", None)
    assert plain.headers["content-type"].startswith("text/plain")
    assert "<" not in plain.text
    assert f"{daemon.url}/docs" in plain.text


def test_the_pages_let_no_other_host_in(daemon: Daemon) -> None:
    for path in ("/", "/docs", "/docs/start.js", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css"):
        answer = daemon.http("GET", path, None, headers={"Accept": "text/html"})
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy, path
        assert "http" not in policy, path
        assert "unsafe-eval" not in policy, path
        assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0], path
        assert answer.headers["x-content-type-options"] == "nosniff", path
    page = daemon.http("GET", "/docs", None).text
    assert "https://" not in page
    assert daemon.http("GET", "/docs/nothing.js", None).status_code == 401, "what is not named is closed"
    assert daemon.http("GET", "/docs/../v1/runs", None).status_code == 401


@pytest.fixture
def requests() -> list[str]:
    return []


@pytest.fixture
def docs(daemon: Daemon, requests: list[str]) -> Iterator[object]:
    """The page /docs in a browser, drawn."""
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        wrong: list[str] = []
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))

        def note(request: Request) -> None:
            requests.append(request.url)

        page.on("request", note)
        page.goto(f"{daemon.url}/docs")
        yield page
        assert wrong == []


def test_docs_show_every_route_and_try_them_with_a_token(daemon: Daemon, docs, requests: list[str]) -> None:  # type: ignore[no-untyped-def]
    run = new_run()
    Agent(daemon, run).begin()
    expect(docs.get_by_text("/v1/runs/{run}/knobs").first).to_be_visible()
    docs.get_by_role("button", name="Authorize").first.click()
    docs.get_by_label("auth-bearer-value").fill(daemon.tokens["read"])
    docs.get_by_role("button", name="Apply credentials").click()
    docs.get_by_role("button", name="Close").last.click()
    route = docs.locator("#operations-runs-runs_v1_runs_get")
    route.locator(".opblock-summary-control").click()
    route.get_by_role("button", name="Try it out").click()
    route.get_by_role("button", name="Execute").click()
    expect(route.locator(".live-responses-table .response .response-col_status")).to_contain_text("200")
    expect(route.locator(".live-responses-table")).to_contain_text(run)
    hosts = {urlsplit(url).netloc for url in requests if urlsplit(url).scheme in ("http", "https")}
    assert hosts == {urlsplit(daemon.url).netloc}, "no other host is asked"
