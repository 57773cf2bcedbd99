"""The link with a one-time code that gives a browser the operate scope, in a real browser."""

from __future__ import annotations

import os
import pty
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.dashboard.browser import PATIENCE_MS, chromium, settle
from tests.dashboard.screen import page as drawn
from tests.dashboard.scripted import Agent, Daemon, start_daemon
from tests.services import ROOT, free_port, until
from tidegate.dashboard import codes, entrance

LINK = re.compile(r"http://127\.0\.0\.1:\d+/open\?code=([\w-]+)")


@dataclass
class View:
    """`tidegate dashboard` as a process, and all that it has printed so far."""

    process: subprocess.Popen[bytes]
    port: int
    said: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def text(self) -> str:
        return "".join(self.said)

    def link(self) -> str:
        """The link that it printed."""
        return until(lambda: LINK.search(self.text), "a link")[0]

    def another_link(self) -> str:
        """What `tidegate dashboard --link` prints."""
        command = [sys.executable, "-m", "tidegate", "dashboard", "--port", str(self.port), "--link"]
        found = LINK.search(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
        assert found
        return found[0]


@contextmanager
def view(daemon_url: str, terminal: bool = False) -> Iterator[View]:
    """The live view as a user starts it, with a terminal or with a pipe, answering."""
    port = free_port()
    command = [sys.executable, "-m", "tidegate", "dashboard", "--port", str(port), "--daemon", daemon_url]
    reading, writing = pty.openpty() if terminal else os.pipe()
    given = writing if terminal else subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, stdin=given, stdout=writing, stderr=writing)
    os.close(writing)
    started = View(process, port)

    def listen() -> None:
        with suppress(OSError):  # a terminal whose other end is gone
            while piece := os.read(reading, 4096):
                started.said.append(piece.decode(errors="replace"))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        until(lambda: _answers(f"{started.url}/_stcore/health"), "the live view")
        yield started
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        listener.join(10)
        os.close(reading)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, View]]:
    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch, start_daemon(state) as daemon:
        patch.setenv("TIDEGATE_STATE_DIR", str(state))
        agent = Agent(daemon)
        agent.train(20)
        with agent.training(), view(daemon.url) as started:
            yield daemon, started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@contextmanager
def window(browser: Browser) -> Iterator[tuple[BrowserContext, Page]]:
    """A browser of its own, without cookies."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(PATIENCE_MS)
    try:
        yield context, context.new_page()
    finally:
        context.close()


def may_operate(page: Page, url: str) -> bool:
    """Whether the page Tune lets its viewer turn knobs."""
    page.goto(f"{url}/tune")
    expect(page.locator(".st-key-access").get_by_test_id("stCaptionContainer")).to_be_visible()
    return page.get_by_text("Changes are made with").count() > 0


# ---- the codes


def test_a_code_opens_once(tmp_path: Path) -> None:
    code = codes.mint(tmp_path / "codes")
    assert codes.redeem(code, tmp_path / "codes")
    assert not codes.redeem(code, tmp_path / "codes")


def test_of_many_who_come_with_one_code_at_once_one_is_let_in(tmp_path: Path) -> None:
    code, let_in, begin = codes.mint(tmp_path), [], threading.Barrier(8)

    def come() -> None:
        begin.wait()
        let_in.append(codes.redeem(code, tmp_path))

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(let_in) == [False] * 7 + [True]


def test_an_old_code_opens_nothing_and_is_gone(tmp_path: Path) -> None:
    code = codes.mint(tmp_path)
    (kept,) = tmp_path.iterdir()
    old = time.time() - codes.LIFE_SECONDS - 1
    os.utime(kept, (old, old))
    assert not codes.redeem(code, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_codes_that_nobody_used_do_not_pile_up(tmp_path: Path) -> None:
    codes.mint(tmp_path)
    for kept in tmp_path.iterdir():
        os.utime(kept, (1.0, 1.0))
    codes.mint(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("code", ["", "x", "../operate.token", "é", "a" * 100_000])
def test_what_is_no_code_opens_nothing(tmp_path: Path, code: str) -> None:
    codes.mint(tmp_path)
    assert not codes.redeem(code, tmp_path)


def test_what_is_kept_of_a_code_is_private_and_opens_nothing(tmp_path: Path) -> None:
    where = tmp_path / "codes"
    where.mkdir(mode=0o755)
    code = codes.mint(where)
    (kept,) = where.iterdir()
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert code not in kept.name
    assert code not in kept.read_text()
    assert not codes.redeem(kept.name, where)


# ---- in a browser


def test_the_link_lets_this_browser_operate_and_nobody_else(
    running: tuple[Daemon, View], browser: Browser, tmp_path: Path
) -> None:
    daemon, started = running
    link = started.link()
    code = LINK.fullmatch(link)[1]  # type: ignore[index]
    with window(browser) as (context, page), window(browser) as (_, stranger):
        assert httpx.head(link, trust_env=False).status_code == 200, "what looks at links does not use them up"
        page.goto(link)
        assert code not in page.url
        assert may_operate(context.new_page(), started.url), "another tab of the same browser"
        assert may_operate(page, started.url)
        field = page.get_by_role("textbox", name="static_ratio", exact=True)
        field.fill("0.25")
        field.press("Enter")
        page.get_by_role("button", name="Set", exact=True).click()
        with daemon.operator() as operator:
            until(lambda: operator.knobs("llama-7b").desired["static_ratio"] == 0.25, "the change")
            audit = [row.model_dump_json() for row in operator.audit()]

        second = stranger.goto(link)
        assert second is not None
        assert second.status == 403
        expect(stranger.get_by_text("was used before, or is older than 10 minutes")).to_be_visible()
        assert "code=" not in second.headers.get("location", "")
        assert not may_operate(stranger, started.url)

        (cookie,) = (one for one in context.cookies() if one["name"].startswith("tidegate"))
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert "tidegate" not in page.evaluate("document.cookie")
        assert cookie["value"] not in (code, daemon.token("operate"))

    secrets = {code, cookie["value"], daemon.token("operate")}
    assert not any(secret in row for secret in secrets for row in audit), "the audit log"
    printed = started.text.replace(link, "", 1)
    assert not any(secret in printed for secret in secrets), "what the view logs"
    stored = b"".join(
        path.read_bytes() for path in daemon.state.rglob("*") if path.suffix != ".token" and path.is_file()
    )
    assert not any(secret.encode() in stored for secret in secrets), "what is on disk"


@pytest.mark.slow
def test_another_link_can_be_had_and_given_back(running: tuple[Daemon, View], browser: Browser) -> None:
    _, started = running
    with window(browser) as (_, page):
        page.goto(started.another_link())
        settle(page)
        page.reload()
        assert may_operate(page, started.url)
        page.get_by_role("button", name="Forget it").click()
        expect(page.get_by_label("Operate token", exact=True)).to_be_visible()
        assert not may_operate(page, started.url)


def test_an_old_link_opens_nothing(running: tuple[Daemon, View], browser: Browser) -> None:
    daemon, started = running
    link = started.another_link()
    for kept in (daemon.state / "codes").iterdir():
        os.utime(kept, (1.0, 1.0))
    assert httpx.get(link, trust_env=False).status_code == 403
    assert "set-cookie" not in httpx.get(link, trust_env=False).headers


def test_another_site_on_this_machine_cannot_use_the_browsers_right(
    running: tuple[Daemon, View], browser: Browser
) -> None:
    """Cookies are the same on all ports of a host, and Streamlit lets every port of this machine speak to it."""
    _, started = running
    link = started.another_link()
    answer = httpx.get(link, trust_env=False)
    name, value = answer.headers["set-cookie"].partition(";")[0].split("=", 1)
    own = {"host": f"127.0.0.1:{started.port}", "origin": started.url}
    assert entrance.cookie_name(own["host"]) == name
    assert entrance.same_origin(own)
    assert not entrance.same_origin({**own, "origin": "http://127.0.0.1:9999"})
    assert not entrance.same_origin({**own, "origin": "null"})
    assert value


@pytest.mark.slow
def test_with_a_terminal_the_browser_is_opened_without_the_code_among_its_arguments(
    running: tuple[Daemon, View], browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, _ = running
    asked, script = tmp_path / "asked", tmp_path / "browser"
    script.write_text(f'#!/bin/sh\necho "$@" > {asked}.new && mv {asked}.new {asked}\n')
    script.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(script))
    with view(daemon.url, terminal=True) as started, window(browser) as (_, page):
        until(asked.exists, "the browser that is opened")
        address = asked.read_text().strip()
        assert address.startswith("file://")
        assert LINK.fullmatch(started.link())[1] not in address  # type: ignore[index]
        page.goto(address)
        page.wait_for_url(f"{started.url}/**")
        settle(page)
        assert may_operate(page, started.url)


# ---- without a link


def test_the_page_says_where_the_token_is(daemon: Daemon) -> None:
    Agent(daemon).train(2)
    said = " ".join(caption.value for caption in drawn("tune").caption)
    assert "tidegate dashboard --link" in said
    assert str(daemon.state / "operate.token") in said


def test_without_the_token_there_is_no_link(tmp_path: Path) -> None:
    environment = {**os.environ, "TIDEGATE_STATE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tidegate", "dashboard", "--link"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1
    assert f"no operate token in {tmp_path}" in done.stderr
