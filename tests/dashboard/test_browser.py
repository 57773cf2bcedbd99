"""The live view as users meet it: real daemon, real server, real browser."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.dashboard.browser import chromium, open_page, screenshot, serve
from tests.dashboard.scripted import Agent, Daemon, start_daemon
from tests.services import until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Agent, str]]:
    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch, start_daemon(state) as daemon:
        patch.setenv("TIDEGATE_STATE_DIR", str(state))
        agent = Agent(daemon)
        agent.train(60)
        with agent.training(), serve(daemon.url) as url:
            until(lambda: answers(f"{url}/_stcore/health"), "the live view", 30)
            yield daemon, agent, url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def refreshes(page: Page, times: int) -> None:
    """Waits until the header has changed `times` times: the live parts did run."""
    for _ in range(times):
        before = page.locator(".tg-head").text_content()
        page.wait_for_function("before => document.querySelector('.tg-head').textContent !== before", arg=before)


def healthy(page: Page, errors: list[str]) -> None:
    expect(page.locator('[data-testid="stException"]')).to_have_count(0)
    assert errors == []


@pytest.mark.slow
def test_the_screenshot_function_writes_a_png(running: tuple[Daemon, Agent, str], tmp_path: Path) -> None:
    screenshot(running[2], tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "page.png").stat().st_size > 10_000


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["light", "dark"])
def test_the_first_screen_tells_the_essential(
    running: tuple[Daemon, Agent, str], browser: Browser, tmp_path: Path, dark: bool
) -> None:
    _, _, url = running
    with open_page(browser, f"{url}/run", dark=dark) as (page, errors):
        expect(page.locator(".tg-verdict")).to_contain_text("The update took")
        expect(page.locator(".tg-kpi").first).to_contain_text("/step")
        for part in ("table.tg", ".st-key-phase_history", ".st-key-stalls"):
            bottom = page.locator(part).first.evaluate("element => element.getBoundingClientRect().bottom")
            assert bottom <= 800, f"{part} is below the first screen"
        background = page.evaluate("getComputedStyle(document.querySelector('.stApp')).backgroundColor")
        assert (sum(map(int, background[4:-1].split(",")[:3])) < 384) == dark
        refreshes(page, 2)
        page.screenshot(path=str(tmp_path / "first.png"))
        healthy(page, errors)


def test_an_update_is_held_and_saved_for_perfetto(running: tuple[Daemon, Agent, str], browser: Browser) -> None:
    _, _, url = running
    with open_page(browser, f"{url}/timeline") as (page, errors):
        page.get_by_role("button", name="Hold").click()
        page.wait_for_url("**/timeline?run=llama-7b&step=*")
        held = int(page.url.rpartition("=")[2])
        title = page.locator(".tg-title", has_text="Update, by lane")
        expect(title).to_contain_text(f"step {held},")
        refreshes(page, 2)
        expect(title).to_contain_text(f"step {held},")
        with page.expect_download() as saved:
            page.get_by_role("button", name="Trace").click()
        trace = json.loads(saved.value.path().read_text())
        slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert {event["pid"] for event in slices} == {0, 1_000_000}, "measured and predicted"
        assert {event["args"]["step"] for event in slices} == {held}
        page.get_by_role("button", name="Follow").click()
        page.wait_for_url("**/timeline?run=llama-7b")
        page.get_by_role("link", name="Run").click()
        page.wait_for_url("**/run?run=llama-7b")
        expect(page.locator(".st-key-memory .main-svg").first).to_be_visible()
        healthy(page, errors)
