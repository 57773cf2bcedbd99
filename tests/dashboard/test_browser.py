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
        for part in ("table.tg", ".st-key-phase_history", ".st-key-link_bytes"):
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


def test_a_wrong_token_is_told_an_edit_survives_refreshes_and_a_set_reaches_the_agent(
    running: tuple[Daemon, Agent, str], tmp_path: Path
) -> None:
    daemon, agent, url = running
    with open_page(f"{url}/tune") as (page, errors):
        token = page.get_by_label("Operate token", exact=True)
        stride = page.get_by_role("textbox", name="stride")
        expect(stride).to_be_disabled()
        token.fill("tide_wrong")
        token.press("Enter")
        # While the page is drawn anew the old field is still there, and under load for seconds.
        expect(page.locator('input[aria-label^="stride"]:enabled')).to_have_count(1, timeout=30_000)
        expect(stride).to_have_count(1, timeout=30_000)
        expect(stride).to_be_enabled()
        stride.fill("3")
        refreshes(page, 2)
        expect(stride).to_have_value("3")
        page.get_by_role("button", name="Set", exact=True).click()
        expect(page.get_by_text("does not accept this operate token")).to_be_visible()
        expect(stride).to_have_value("3")
        token.fill(daemon.token("operate"))
        token.press("Enter")
        expect(stride).to_have_value("3")
        page.get_by_role("button", name="Set", exact=True).click()
        expect(page.get_by_test_id("stAlert").get_by_text("Generation 1")).to_be_visible()
        wait_until(lambda: agent.knobs["stride"] == 3.0, "the agent to apply stride 3")
        expect(page.get_by_text("applied on 1 of 1 ranks")).to_be_visible()
        expect(stride).to_have_value("3")
        expect(page.get_by_text("The form was filled on")).to_have_count(0)
        page.locator(".stForm").scroll_into_view_if_needed()
        page.screenshot(path=str(tmp_path / "form.png"))
        healthy(page, errors)
