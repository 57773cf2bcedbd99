"""The ways into the live view, in a real browser: a link with a one-time code, and a token that is pasted."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send
from typer.testing import CliRunner
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.dashboard.browser import PATIENCE_MS, chromium, session, settle
from tests.dashboard.screen import page as drawn
from tests.dashboard.scripted import Agent, Daemon, start_daemon
from tests.services import ROOT, free_port, until
from tidegate.cli import main
from tidegate.dashboard import PUBLIC_VARIABLE
from tidegate.dashboard.pages.registry import SCREENS
from tidegate.dashboard.server import request_guard, sign_in
from tidegate.dashboard.session import browser_sessions, one_time_codes

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
    code = one_time_codes.mint(tmp_path / "codes")
    assert one_time_codes.redeem(code, tmp_path / "codes")
    assert not one_time_codes.redeem(code, tmp_path / "codes")


def test_of_many_who_come_with_one_code_at_once_one_is_let_in(tmp_path: Path) -> None:
    code, let_in, begin = one_time_codes.mint(tmp_path), [], threading.Barrier(8)

    def come() -> None:
        begin.wait()
        let_in.append(one_time_codes.redeem(code, tmp_path))

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(let_in) == [False] * 7 + [True]


def test_an_old_code_opens_nothing_and_is_gone(tmp_path: Path) -> None:
    code = one_time_codes.mint(tmp_path)
    (kept,) = tmp_path.iterdir()
    old = time.time() - one_time_codes.LIFE_SECONDS - 1
    os.utime(kept, (old, old))
    assert not one_time_codes.redeem(code, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_codes_that_nobody_used_do_not_pile_up(tmp_path: Path) -> None:
    one_time_codes.mint(tmp_path)
    for kept in tmp_path.iterdir():
        os.utime(kept, (1.0, 1.0))
    one_time_codes.mint(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("code", ["", "x", "../operate.token", "é", "a" * 100_000])
def test_what_is_no_code_opens_nothing(tmp_path: Path, code: str) -> None:
    one_time_codes.mint(tmp_path)
    assert not one_time_codes.redeem(code, tmp_path)


def test_what_is_kept_of_a_code_is_private_and_opens_nothing(tmp_path: Path) -> None:
    where = tmp_path / "codes"
    where.mkdir(mode=0o755)
    code = one_time_codes.mint(where)
    (kept,) = where.iterdir()
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert code not in kept.name
    assert code not in kept.read_text()
    assert not one_time_codes.redeem(kept.name, where)


# ---- in a browser


def test_the_link_lets_this_browser_operate_and_nobody_else(
    running: tuple[Daemon, View], browser: Browser, tmp_path: Path
) -> None:
    daemon, started = running
    link = started.link()
    code = LINK.fullmatch(link)[1]  # type: ignore[index]
    with window(browser) as (context, page), window(browser) as (_, stranger):
        assert httpx.head(link, trust_env=False).status_code == 200, "what looks at links does not use them up"
        for early in ({"Sec-Purpose": "prefetch;prerender"}, {"Purpose": "prefetch"}):
            answer = httpx.get(link, headers=early, trust_env=False)
            assert (answer.status_code, len(answer.cookies)) == (425, 0), early
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
        stranger.goto(f"{started.url}/tune")
        expect(stranger.get_by_text("This browser is not signed in")).to_be_visible()

        (cookie,) = (one for one in context.cookies() if one["name"].startswith("tidegate"))
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")
        assert 0 < cookie["expires"] - time.time() <= browser_sessions.LIFE_SECONDS
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
    assert browser_sessions.cookie_name(own["host"]) == name
    assert browser_sessions.same_origin(own)
    assert not browser_sessions.same_origin({**own, "origin": "http://127.0.0.1:9999"})
    assert not browser_sessions.same_origin({**own, "origin": "null"})
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


def test_without_the_operate_token_the_link_only_lets_look(tmp_path: Path) -> None:
    environment = {**os.environ, "TIDEGATE_STATE_DIR": str(tmp_path / "state")}
    command = [sys.executable, "-m", "tidegate", "dashboard", "--link"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0
    assert LINK.search(done.stdout)
    assert f"no operate token in {tmp_path / 'state'}" in done.stderr
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_where_codes_cannot_be_kept_there_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = {**os.environ, "TIDEGATE_STATE_DIR": str(tmp_path / "file")}
    command = [sys.executable, "-m", "tidegate", "dashboard", "--link"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1
    assert "There is no link" in done.stderr


# ---- without a session


def status_of_websocket(url: str, **headers: str) -> int:
    try:
        with connect(url.replace("http", "ws") + "/_stcore/stream", additional_headers=headers, proxy=None):
            return 101
    except InvalidStatus as refusal:
        return refusal.response.status_code


def test_without_a_session_there_is_the_entrance_and_nothing_else(running: tuple[Daemon, View]) -> None:
    _, started = running
    with httpx.Client(base_url=started.url, trust_env=False) as stranger:
        pages = [f"/{screen.path}" for screen in SCREENS]
        for path in ("/", *pages, "/media/x", "/_stcore/host-config", "/index.html"):
            answer = stranger.get(path)
            assert answer.status_code == 403, path
            assert "tidegate dashboard --link" in answer.text, path
            assert "<script" not in answer.text, path
        assert stranger.put("/_stcore/upload_file/a/b", content=b"x").status_code == 403
        assert stranger.get("/_stcore/health").status_code == 200
    assert status_of_websocket(started.url) == 403
    assert status_of_websocket(started.url, Origin=started.url, Cookie="tidegate=x") == 403
    name, value = session(started.url)
    assert status_of_websocket(started.url, Origin=started.url, Cookie=f"{name}={value}") == 101
    assert status_of_websocket(started.url, Origin=started.url, Cookie=f"{name}={value}x") == 403


def test_a_token_in_the_entrance_lets_in_by_its_scope(running: tuple[Daemon, View], browser: Browser) -> None:
    """And the browser goes on to the page that it wanted."""
    daemon, started = running
    for scope, may in (("read", False), ("operate", True)):
        with window(browser) as (_, page):
            page.goto(f"{started.url}/tune?run=llama-7b")
            field = page.get_by_label("Token", exact=True)
            field.fill("tide_wrong")
            field.press("Enter")
            expect(page.get_by_text("does not accept this token")).to_be_visible()
            page.get_by_label("Token", exact=True).fill(daemon.token(scope))
            page.get_by_role("button", name="Enter").click()
            page.wait_for_url(f"{started.url}/tune?run=llama-7b")
            settle(page)
            assert may_operate(page, started.url) == may


def test_tokens_that_the_view_does_not_know_are_shown_to_the_daemon(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the view has the read token only."""
    monkeypatch.setenv("TIDEGATE_TOKEN_DIR", str(tmp_path / "none"))
    assert sign_in._check(daemon.token("operate")) == (daemon.token("operate"), "")
    assert sign_in._check(daemon.token("read")) == ("", "")
    assert "does not accept" in sign_in._check(daemon.token("alert"))[1]
    assert "does not accept" in sign_in._check("tide_é")[1]
    daemon.stop()
    assert "could not be checked" in sign_in._check(daemon.token("read"))[1]


@pytest.mark.parametrize("then", ["//evil.test", "http://evil.test", "/\\evil.test", "\t//evil.test", "evil"])
def test_the_entrance_leads_nowhere_else(running: tuple[Daemon, View], then: str) -> None:
    daemon, started = running
    told = {"token": daemon.token("read"), "then": then}
    answer = httpx.post(f"{started.url}/enter", data=told, trust_env=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")


def test_the_entrance_takes_no_large_form_and_none_of_another_site(running: tuple[Daemon, View]) -> None:
    daemon, started = running
    assert httpx.post(f"{started.url}/enter", content=b"x" * 100_000, trust_env=False).status_code == 413
    told, foreign = {"token": daemon.token("read")}, {"Origin": "http://evil.test"}
    answer = httpx.post(f"{started.url}/enter", data=told, headers=foreign, trust_env=False)
    assert answer.status_code == 400
    assert "set-cookie" not in answer.headers


def test_sessions_end_and_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"tidegate-1": browser_sessions.begin("secret")}
    found = browser_sessions.find("host:1", first)
    assert found is not None
    assert found.operate == "secret"
    assert browser_sessions.find("host:2", first) is None
    assert browser_sessions.find("host:999999", first) is None
    browser_sessions.make_read_only("host:1", first)
    assert browser_sessions.find("host:1", first) == browser_sessions.Session("", found.ends_at)
    monkeypatch.setattr(time, "time", lambda: found.ends_at)
    assert browser_sessions.find("host:1", first) is None
    old = {"tidegate-1": browser_sessions.begin()}
    for _ in range(browser_sessions.SESSIONS_KEPT):
        newest = {"tidegate-1": browser_sessions.begin()}
    assert browser_sessions.find("host:1", old) is None
    assert browser_sessions.find("host:1", newest) is not None


def test_a_websocket_ends_with_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the page asks for the next figures."""
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while heard.append((await receive())["type"]) or heard[-1] != "websocket.disconnect":
            browser_sessions._sessions.clear()

    async def receive() -> Message:
        return {"type": "websocket.receive", "bytes": b""}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    cookie = f"tidegate-1={browser_sessions.begin()}".encode()
    scope = {
        "type": "websocket", "path": "/_stcore/stream", "query_string": b"",
        "headers": [(b"host", b"127.0.0.1:1"), (b"cookie", cookie)],
    }  # fmt: skip
    with ThreadPoolExecutor(1) as apart:  # this thread has the browser's event loop
        apart.submit(asyncio.run, request_guard.RequestGuard(app)(scope, receive, send)).result()
    assert heard == ["websocket.receive", "websocket.disconnect"]
    assert [message["code"] for message in sent] == [request_guard.POLICY_VIOLATION]


def test_public_needs_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = HTTPConnection({"type": "http", "path": "/run", "headers": [(b"host", b"127.0.0.1:1")]})
    assert not request_guard.may_pass(stranger)
    monkeypatch.setenv(PUBLIC_VARIABLE, "1")
    assert request_guard.may_pass(stranger)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "Open (once, within 10 minutes) http://127.0.0.1:"),
        (["--bind", "0.0.0.0"], "Listening on 0.0.0.0, for other machines too. Each browser needs a link or a token"),
        (["--bind", "0.0.0.0", "--public"], "--public: whoever reaches 0.0.0.0 sees all runs"),
    ],
)
def test_the_command_says_who_gets_in(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path))
    given: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda program, words, env: given.append(env))
    said = CliRunner().invoke(main.app, ["dashboard", "--port", "0", "--no-open", *arguments]).output
    assert told in said
    assert [env[PUBLIC_VARIABLE] for env in given] == ["1" if "--public" in arguments else ""]


def test_who_sends_without_reading_takes_no_memory(running: tuple[Daemon, View]) -> None:
    """Without a session, too: requests that come before the answers to earlier ones are not read."""
    view = running[1]
    ask = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20_000
    before = server_bytes(view)
    with ExitStack() as stack:
        senders = [stack.enter_context(socket.create_connection(("127.0.0.1", view.port))) for _ in range(10)]
        for sender in senders:
            sender.setblocking(False)
        end = time.monotonic() + 4
        while time.monotonic() < end:
            for sender in senders:
                with suppress(OSError):
                    sender.send(ask)
        assert server_bytes(view) < before + (40 << 20)
    until(lambda: httpx.get(f"{view.url}/_stcore/health").status_code == 200, "an answer")


def server_bytes(view: View) -> int:
    """Resident memory of the command and of what it started."""
    pids = {view.process.pid}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            if int(rest.split()[1]) in pids:
                pids.add(int(name.split()[0]))
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * os.sysconf("SC_PAGE_SIZE")
