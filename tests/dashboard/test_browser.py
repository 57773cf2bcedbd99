"""The live view as users meet it: real daemon, real server, real browser."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.dashboard.browser import open_page, screenshot, serve
from tests.dashboard.scripted import Agent, Daemon, start_daemon, wait_until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Agent, str]]:
    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch, start_daemon(state) as daemon:
        patch.setenv("TIDEGATE_STATE_DIR", str(state))
        agent = Agent(daemon)
        agent.train(60)
        with agent.training(), serve(daemon.url) as url:
            wait_until(lambda: answers(f"{url}/_stcore/health"), "the live view", 30)
            yield daemon, agent, url


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


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_first_screen_tells_the_essential(running: tuple[Daemon, Agent, str], tmp_path: Path, dark: bool) -> None:
    _, _, url = running
    with open_page(f"{url}/run", dark=dark) as (page, errors):
        expect(page.locator(".tg-verdict")).to_contain_text("The update is")
        expect(page.locator(".tg-kpi").first).to_contain_text("/step")
        for part in ("table.tg", ".st-key-phase_history", ".st-key-stalls"):
            bottom = page.evaluate("name => document.querySelector(name).getBoundingClientRect().bottom", part)
            assert bottom <= 800, f"{part} is below the first screen"
        background = page.evaluate("getComputedStyle(document.querySelector('.stApp')).backgroundColor")
        assert (sum(map(int, background[4:-1].split(",")[:3])) < 384) == dark
        refreshes(page, 2)
        page.screenshot(path=str(tmp_path / "first.png"))
        healthy(page, errors)


def test_the_screenshot_function_writes_a_png(running: tuple[Daemon, Agent, str], tmp_path: Path) -> None:
    screenshot(running[2], tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "page.png").stat().st_size > 10_000
