"""What comes from outside into the live view: texts of alerts and agents, and requests of other sites."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, expect
from starlette.datastructures import Headers
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.daemon.live import hello
from tests.dashboard.browser import chromium, serve, settle
from tests.services import DaemonProcess, daemon_process, until
from tidegate.client import DaemonClient
from tidegate.dashboard import HOSTS_VARIABLE, guard
from tidegate.wire.agent import AgentReport
from tidegate.wire.step import LinkRow, StallRow, StepReport
from tidegate.wire.timeline import PhaseRow, SpanRow, TimelineView

RUN = "outside"
EVIL = "http://evil.test/"
IMAGE = f"![a]({EVIL}a)<img src={EVIL}b>"
"""Fits into a label of 64 characters."""
PAGES = ("", "run", "tune", "timeline", "alerts", "plan")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with daemon_process(tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture(scope="module")
def view(daemon: DaemonProcess) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEGATE_STATE_DIR", str(daemon.state))
        with serve(daemon.url) as url:
            until(lambda: answers(f"{url}/_stcore/health"), "the live view", 60)
            yield url


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def evil_report(step: int) -> AgentReport:
    """Every text that an agent may choose is an image of another host."""
    done = StepReport(
        step=step, timestamp=time.time(), phase_seconds={"update": 0.5, IMAGE: 0.25}, exposed_seconds={IMAGE: 0.1},
        stalls=(StallRow(phase="update", cause=IMAGE, seconds=0.4),),
        links=(LinkRow(direction=IMAGE, phase=IMAGE, content=IMAGE, bytes=10, busy_seconds=0.1),),
        device_memory_peak_bytes={IMAGE: 10}, host_memory_bytes={IMAGE: 10}, cpu_seconds={IMAGE: 0.1},
        update_params={IMAGE: 10}, subgroups={IMAGE: 3}, loss=1.0, verdict=IMAGE * 3,
    )  # fmt: skip
    spans = (SpanRow(op=0, kind=IMAGE, lane=IMAGE, subgroup=0, start=0.0, end=0.5, nbytes=10, numel=10),)
    timeline = TimelineView(
        step=step, source="measured", origin=0.0, phases=(PhaseRow(phase=IMAGE, start=0.0, end=0.5),), spans=spans,
        num_spans=1,
    )  # fmt: skip
    return AgentReport(
        timestamp=time.time(), step=step, phase=IMAGE, generation=0, effective={"stride": 2.0, IMAGE: IMAGE},
        steps=(done,), timeline=timeline,
    )  # fmt: skip


def tell_evil_alerts(daemon: DaemonProcess) -> None:
    texts = dict.fromkeys(("summary", "description"), IMAGE * 2)
    alert = {
        "status": "firing", "startsAt": "2026-03-01T10:00:00Z", "endsAt": "0001-01-01T00:00:00Z", "fingerprint": "f1",
        "labels": {"alertname": IMAGE, "severity": IMAGE, "run": RUN, IMAGE: IMAGE},
        "annotations": {**texts, "knob": IMAGE, "runbook_url": f"javascript:{IMAGE}"},
    }  # fmt: skip
    told = {"version": "4", "status": "firing", "alerts": [alert, {**alert, "fingerprint": "f2", "status": "resolved"}]}
    headers = {"Authorization": f"Bearer {daemon.token('alert')}"}
    answer = httpx.post(f"{daemon.url}/v1/alerts", json=told, headers=headers, trust_env=False)
    assert answer.status_code < 300, answer.text


@pytest.mark.slow
def test_no_text_from_outside_becomes_markup_on_any_page(daemon: DaemonProcess, view: str, browser: Browser) -> None:
    said = hello(RUN, world_size=1, host=IMAGE, policy=IMAGE)
    with DaemonClient(daemon.url, daemon.token("agent")) as agent, daemon.client() as operator:
        agent.hello(said)
        for step in range(1, 4):
            agent.report(said.agent, evil_report(step))
        operator.set_knobs(RUN, {"stride": 3}, reason=IMAGE * 4, wait=0.0)
        tell_evil_alerts(daemon)
        for page_name in PAGES:
            agent.report(said.agent, evil_report(4))
            context = browser.new_context()
            page = context.new_page()
            page.set_default_timeout(60_000)
            asked: list[str] = []
            told: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("console", lambda message, told=told: told.append(message.text))
            page.goto(f"{view}/{page_name}?run={RUN}&model={IMAGE}")
            settle(page) if page_name != "plan" else expect(page.locator(".tg-title").first).to_be_visible()
            found = page.locator("img[src*=evil], a[href*=evil], a[href^=javascript], video, iframe[src*=evil]")
            expect(found).to_have_count(0)
            assert [url for url in asked if "evil" in url and not url.startswith(view)] == []
            assert [text for text in told if "Content Security Policy" in text] == [], page_name
            context.close()
        agent.goodbye(said.agent)


@pytest.mark.slow
def test_the_policy_keeps_other_hosts_away_even_if_markup_got_through(view: str, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    page.goto(view)
    page.evaluate("url => document.body.insertAdjacentHTML('beforeend', `<img src='${url}'>`)", f"{EVIL}c")
    until(lambda: page.wait_for_timeout(20) or any("Content Security Policy" in text for text in told), "the refusal")
    context.close()


def test_a_page_with_another_host_or_origin_gets_no_answer(view: str) -> None:
    own = httpx.URL(view).netloc.decode()
    ask = httpx.Client(trust_env=False)
    for name in ("evil.test", "evil.test:8501", "127.0.0.1.evil.test", ""):
        answer = ask.get(view, headers={"Host": name})
        assert answer.status_code == 400, name
    assert "--allowed-host evil.test" in ask.get(view, headers={"Host": "evil.test:1"}).text
    assert ask.get(view, headers={"Origin": "http://evil.test"}).status_code == 400
    assert ask.get(view, headers={"Origin": "null"}).status_code == 400
    for name in (own, f"localhost:{own.partition(':')[2]}", "10.1.2.3:8501", "[::1]:8501", socket.gethostname()):
        answer = ask.get(view, headers={"Host": name})
        assert answer.status_code == 200, name
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]


def test_a_websocket_with_another_host_or_origin_is_refused(view: str) -> None:
    stream = view.replace("http", "ws") + "/_stcore/stream"

    def status(**headers: str) -> int:
        try:
            with connect(stream, additional_headers=headers, proxy=None):
                return 101
        except InvalidStatus as refusal:
            return refusal.response.status_code

    assert status() == 101
    assert status(Origin=view) == 101
    assert status(Origin="http://evil.test") in (400, 403)
    assert status(Origin=view.replace("127.0.0.1", "localhost")) in (400, 403)
    host, port = httpx.URL(view).host, httpx.URL(view).port
    request = (
        f"GET /_stcore/stream HTTP/1.1\r\nHost: evil.test:{port}\r\nOrigin: http://evil.test:{port}\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    with socket.create_connection((host, port)) as rebound:  # as after DNS rebinding: both name the other site
        rebound.sendall(request.encode())
        assert rebound.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 403")


def test_names_that_were_allowed_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Headers({"host": "tide.example.com"})
    assert guard.refused(asked) is not None
    monkeypatch.setenv(HOSTS_VARIABLE, "other.example.com, Tide.example.com")
    assert guard.refused(asked) is None
    assert guard.refused(Headers({"host": "evil.test"})) is not None
    monkeypatch.setenv(HOSTS_VARIABLE, "*")
    assert guard.refused(Headers({"host": "evil.test"})) is None
    assert guard.refused(Headers({"host": "[bad"})) is not None
