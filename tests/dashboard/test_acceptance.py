"""The live view as users meet it: a real daemon, a real training run, a real server, a real browser, all pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.dashboard.browser import settle
from tests.dashboard.stand import RUN, Stand, Viewer, stand
from tests.services import until
from tidegate.dashboard.pages.registry import SCREENS

pytestmark = pytest.mark.slow
ACCEPTED = re.compile("is (applied on|accepted by) all ranks")
TOO_WIDE = """() => {
  const main = document.querySelector('.stMain');
  return main.scrollWidth - main.clientWidth;
}"""


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with stand(tmp_path_factory.mktemp("stand")) as made:
        made.alert("TidegatePathErrors", "critical", "tier_split", summary=f"{RUN}: 3 reads of pfs failed")
        yield made


def knob(viewer: Viewer, name: str, value: str) -> None:
    """Fills a field that can be edited: while a page is drawn anew, the one of before may still be there, disabled."""
    viewer.page.get_by_role("textbox", name=name, exact=True, disabled=False).fill(value)


def press(viewer: Viewer, name: str) -> None:
    viewer.page.get_by_role("button", name=name, exact=True).first.click()


def notice(viewer: Viewer, words: str | re.Pattern[str]) -> None:
    expect(viewer.page.get_by_test_id("stAlert").get_by_text(words)).to_be_visible()


def refreshes(viewer: Viewer, times: int) -> None:
    """Waits until the header has changed `times` times: the live parts did run."""
    for _ in range(times):
        before = viewer.page.locator(".tg-head").first.text_content()
        viewer.page.wait_for_function("before => document.querySelector('.tg-head').textContent !== before", arg=before)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_opens_and_stays_healthy(everything: Stand, tmp_path: Path, dark: bool) -> None:
    """In the light by their addresses, in the dark by their links."""
    with everything.viewer(SCREENS[0].path, dark=dark, run=RUN) as viewer:
        for screen in SCREENS:
            page = viewer.page
            if dark:
                page.get_by_role("link", name=screen.title, exact=True).click()
            else:
                page.goto(f"{everything.view}/{screen.path}?run={RUN}")
            expect(page.locator(f".st-key-link-{screen.path}-open")).to_be_visible()
            settle(page)
            if screen.about != "all":
                expect(page.locator(".tg-run").first).to_have_text(RUN)
            background = page.evaluate("getComputedStyle(document.querySelector('.stApp')).backgroundColor")
            assert (sum(map(int, background[4:-1].split(",")[:3])) < 384) == dark
            assert page.evaluate(TOO_WIDE) <= 0, f"{screen.path} is wider than 1280 pixels"
            shot = tmp_path / f"{screen.path}.png"
            page.screenshot(path=str(shot))
            assert shot.stat().st_size > 10_000
            viewer.healthy()


def test_a_knob_is_previewed_set_on_trial_applied_measured_and_taken_back(everything: Stand) -> None:
    with everything.viewer("tune", run=RUN) as viewer, everything.daemon.client() as operator:
        page = viewer.page
        expect(page.get_by_role("textbox", name="stride", exact=True)).to_be_disabled()
        field = page.get_by_label("Operate token", exact=True)
        field.fill("tide_wrong")
        field.press("Enter")
        notice(viewer, "does not accept this operate token")
        viewer.give_token(everything.daemon.token("operate"))
        knob(viewer, "stride", "off")
        refreshes(viewer, 1)
        expect(page.get_by_role("textbox", name="stride", exact=True)).to_have_value("off")
        press(viewer, "Preview")
        expect(page.get_by_text("Preview of stride 1.5 → off")).to_be_visible()
        expect(page.get_by_text("predicted then")).to_be_visible()
        assert operator.knobs(RUN).generation == 0
        page.get_by_label("Reason", exact=True).fill("the device is no help")
        on_trial = page.get_by_text("On trial, for")
        expect(on_trial).to_have_count(1)  # while the page is drawn anew, what was drawn before is still there
        on_trial.click()
        press(viewer, "Set")
        notice(viewer, "It is on trial")
        expect(page.get_by_text("applied on 1 of 1 ranks")).to_be_visible()
        assert operator.run(RUN).ranks[0].effective["stride"] == "off"
        expect(page.get_by_text("Helpful: a step (forward, backward and update) took")).to_be_visible()
        expect(page.get_by_text("Measured: update").first).to_be_visible()
        press(viewer, "Roll back …")
        press(viewer, "Roll back")
        notice(viewer, "Back to the knobs of generation 0")
        until(lambda: operator.run(RUN).ranks[0].effective["stride"] == 1.5, "the way back", 90)
        viewer.healthy()
        page.get_by_role("link", name="Alerts and audit").click()
        expect(page.get_by_text("the device is no help").first).to_be_visible()
        page.get_by_label("Words", exact=True).fill("no help proposed")
        page.get_by_label("Words", exact=True).press("Enter")
        expect(page.get_by_text("1 of ")).to_be_visible()
        expect(page).to_have_url(re.compile(r"q=no\+help\+proposed"))
        viewer.healthy()


def test_of_two_who_edit_at_once_the_second_is_told_and_keeps_the_edit(everything: Stand) -> None:
    token = everything.daemon.token("operate")
    with everything.viewer("tune", run=RUN) as one, everything.viewer("tune", run=RUN) as two:
        for viewer in (one, two):
            viewer.give_token(token)
        knob(one, "static_ratio", "0.25")
        knob(two, "stride", "2")
        press(two, "Set")
        notice(two, ACCEPTED)
        press(one, "Set")
        notice(one, "someone else was faster")
        expect(one.page.get_by_role("textbox", name="static_ratio", exact=True)).to_have_value("0.25")
        with everything.daemon.client() as operator:
            assert operator.knobs(RUN).desired["static_ratio"] == 0.0
            press(one, "Set")
            until(lambda: operator.knobs(RUN).desired["static_ratio"] == 0.25, "the second edit", 90)
            assert operator.knobs(RUN).desired["stride"] == 2.0
        one.healthy()
        two.healthy()


def test_a_daemon_that_is_killed_under_an_open_page_is_told_and_found_again(everything: Stand) -> None:
    with everything.viewer("tune", run=RUN) as viewer:
        page = viewer.page
        viewer.give_token(everything.daemon.token("operate"))
        knob(viewer, "stride", "3")
        everything.daemon.kill()
        expect(page.get_by_text("No daemon answers at").first).to_be_visible()
        expect(page.get_by_text("this page reconnects by itself")).to_be_visible()
        expect(page.locator("table.tg").first).to_be_visible()
        everything.daemon.start()
        expect(page.get_by_text("No daemon answers at")).to_have_count(0)
        expect(page.get_by_role("textbox", name="stride", exact=True)).to_have_value("3")
        expect(page.locator(".tg-pill", has_text="live").first).to_be_visible()
        viewer.healthy()
