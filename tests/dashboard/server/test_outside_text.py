"""What comes from outside into the live view: texts of alerts and agents, and requests of other sites."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import unescape
from typing import get_args
from urllib.parse import urlencode, urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, expect
from starlette.datastructures import Headers
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.daemon.live import hello
from tests.dashboard.browser import PATIENCE_MS, chromium, serve, session, settle, sign_in
from tests.services import DaemonProcess, daemon_process, until
from tidegate.client.daemon_client import DaemonClient
from tidegate.dashboard import HOSTS_VARIABLE
from tidegate.dashboard.figures import chart_style, charts, gantt, memory_chart
from tidegate.dashboard.server import request_guard
from tidegate.dashboard.style import markup
from tidegate.errors import NotAuthorized
from tidegate.wire.agent import AgentReport, Applied, Vote
from tidegate.wire.step import LinkRow, StallRow, StepReport
from tidegate.wire.timeline import PhaseRow, SpanRow, TimelineView

EVIL = "http://evil.test/"
TEXTS = (
    f"![a]({EVIL}a)<img src={EVIL}b>",
    f'<a href="{EVIL}">a</a>',
    f"[x]({EVIL}) {EVIL}",
    "www.evil.test a@evil.test",
)
"""Each fits into a label of 64 characters."""
LEADS_AWAY = """() => [...document.querySelectorAll('*')]
  .flatMap(e => [...e.attributes].filter(a => ['href', 'src', 'data', 'action'].includes(a.localName)))
  .map(a => a.value)
  .filter(value => /^\\s*javascript:/i.test(value)
    || (value.includes('evil') && new URL(value, location.href.startsWith('http') ? location.href : 'http://x/').hostname
        .includes('evil')))"""
DRAWN = {"run": ("stalls", "link_bytes"), "timeline": ("gantt",)}
"""Charts with names from outside."""
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


def evil_report(step: int, text: str, applied: Applied | None = None) -> AgentReport:
    """Every text that an agent may choose is `text`, once in a known phase, which is drawn, and once in its own."""
    done = StepReport(
        step=step, timestamp=time.time(), phase_seconds={"update": 0.5, text: 0.25}, exposed_seconds={text: 0.1},
        stalls=tuple(StallRow(phase=phase, cause=text, seconds=0.4) for phase in ("update", text)),
        links=tuple(
            LinkRow(direction=text, phase=phase, content=text, bytes=10, busy_seconds=0.1) for phase in ("update", text)
        ),
        device_memory_peak_bytes={"update": 10, text: 10}, host_memory_bytes={"state": 5, text: 10},
        cpu_seconds={text: 0.1}, update_params={text: 10}, subgroups={text: 3}, loss=1.0, verdict=text * 3,
    )  # fmt: skip
    return AgentReport(
        timestamp=time.time(), step=step, phase=text, generation=0, effective={"stride": 2.0, text: text},
        steps=(done,), timeline=evil_timeline(step, text), applied=applied,
    )  # fmt: skip


def evil_timeline(step: int, text: str) -> TimelineView:
    spans = (
        SpanRow(op=0, kind=text, lane=text, subgroup=0, start=0.0, end=0.4, nbytes=10, numel=10),
        SpanRow(op=1, kind="cpu_update", lane="cpu", subgroup=0, start=0.4, end=0.5, nbytes=0, numel=10),
    )
    phases = (PhaseRow(phase="update", start=0.0, end=0.5), PhaseRow(phase=text, start=0.5, end=0.9))
    return TimelineView(
        step=step, source="measured", origin=0.0, phases=phases, spans=spans, num_spans=2, deps={1: (0,)},
    )  # fmt: skip


def tell_evil_alerts(daemon: DaemonProcess, run: str, text: str) -> None:
    texts = dict.fromkeys(("summary", "description"), text * 2)
    alert = {
        "status": "firing", "startsAt": "2026-03-01T10:00:00Z", "endsAt": "0001-01-01T00:00:00Z",
        "fingerprint": f"{run.encode().hex()}1",
        "labels": {"alertname": text, "severity": text, "run": run, text: text},
        "annotations": {**texts, "knob": text, "runbook_url": f"javascript:{text}"},
    }  # fmt: skip
    resolved = {**alert, "fingerprint": f"{run.encode().hex()}2", "status": "resolved"}
    told = {"version": "4", "status": "firing", "alerts": [alert, resolved]}
    headers = {"Authorization": f"Bearer {daemon.token('alert')}"}
    answer = httpx.post(f"{daemon.url}/v1/alerts", json=told, headers=headers, trust_env=False)
    assert answer.status_code < 300, answer.text


def tell_all(daemon: DaemonProcess, run: str, text: str) -> Agent:
    """A run of which every text from outside is `text`: of its agent, of alerts, of votes, and of those who turn knobs,
    whose token and whose own name it is, too."""
    said = hello(run, world_size=1, host=text, policy=text)
    agent = DaemonClient(daemon.url, daemon.token("agent"))
    agent.hello(said)
    for step in range(1, 4):
        agent.report(said.agent, evil_report(step, text))
    made = subprocess.run(
        [sys.executable, "-m", "tidegate", "token", "create", "operate", "--name", text, "--state-dir", daemon.state],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    with DaemonClient(daemon.url, made.stdout.strip()) as operator:
        operator._transport._headers["Tidegate-Actor"] = text  # whoever asks chooses it
        until(lambda: knows(operator), "the daemon to know the token")
        for generation, can in ((1, True), (2, False)):
            operator.set_knobs(run, {"stride": 2.0 + generation}, reason=text * 4, wait=0.0)
            agent.vote(said.agent, Vote(generation=generation, can=can, reason=text * 4))
            if can:
                applied = Applied(generation=generation, step=4)
                agent.report(said.agent, evil_report(4, text, applied).model_copy(update={"generation": generation}))
    tell_evil_alerts(daemon, run, text)
    return Agent(said.agent, agent)


def knows(client: DaemonClient) -> bool:
    try:
        client.runs()
    except NotAuthorized:
        return False
    return True


@dataclass
class Agent:
    id: str
    client: DaemonClient


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_no_text_from_outside_becomes_markup_on_any_page(
    daemon: DaemonProcess, view: str, browser: Browser, text: str
) -> None:
    run = f"www.evil.test-{TEXTS.index(text)}"
    agent = tell_all(daemon, run, text)
    with contextlib.closing(agent.client), contextlib.closing(browser.new_context()) as context:
        sign_in(context, view)
        for page_name in PAGES:
            agent.client.report(agent.id, evil_report(5, text).model_copy(update={"generation": 1}))
            page = context.new_page()
            page.set_default_timeout(PATIENCE_MS)
            asked: list[str] = []
            told: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("console", lambda message, told=told: told.append(message.text))
            page.goto(f"{view}/{page_name}?{urlencode({'run': run, 'model': text})}")
            settle(page) if page_name != "plan" else expect(page.locator(".tg-title").first).to_be_visible()
            if page_name == "timeline":
                page.get_by_text("Whole step", exact=True).click()
            for chart in DRAWN.get(page_name, ()):
                expect(page.locator(f".st-key-{chart}")).to_contain_text(text.partition(" ")[0][:20])
            assert page.evaluate(LEADS_AWAY) == [], page_name
            expect(page.locator("video, iframe")).to_have_count(0)
            assert [url for url in asked if urlsplit(url).netloc != urlsplit(view).netloc and is_remote(url)] == []
            assert [line for line in told if "Content Security Policy" in line] == [], page_name
            page.close()
        agent.client.goodbye(agent.id)


def is_remote(url: str) -> bool:
    return urlsplit(url).scheme in ("http", "https", "ws", "wss", "ftp")


def test_what_is_looked_for_is_found_where_it_is(browser: Browser) -> None:
    """Links and images of HTML, of SVG as Plotly makes them, and scripts."""
    page = browser.new_page()
    page.set_content(
        f"<a href='{EVIL}'>a</a><img src='{EVIL}'><a href='javascript:evil()'>b</a><a href='/?run=www.evil.test'>c</a>"
        f"<svg xmlns:xlink='http://www.w3.org/1999/xlink'><a xlink:href='{EVIL}'><text>d</text></a></svg>"
    )
    assert len(page.evaluate(LEADS_AWAY)) == 4
    page.close()


# ---- figures and labels, without a browser


def texts_of(figure: object) -> Iterator[str]:
    if isinstance(figure, str):
        yield figure
    elif isinstance(figure, Mapping):
        for part in figure.values():
            yield from texts_of(part)
    elif isinstance(figure, list | tuple):
        for part in figure:
            yield from texts_of(part)


@pytest.mark.parametrize("text", [*TEXTS, "%{evil} &lt;b&gt; & <b>bold</b>"])
def test_no_text_from_outside_becomes_markup_in_a_figure(text: str) -> None:
    steps = [step for number in (1, 2) for step in evil_report(number, text).steps]
    marks = [charts.Mark(2, text, (text, text))]
    timeline = evil_timeline(1, text)
    figures = (
        charts.phase_history(steps, marks), charts.stalls_by_cause(steps), charts.link_bytes(steps),
        charts.cpu_cores(steps), memory_chart.memory_figure(steps), chart_style.empty(text),
        *(gantt.gantt(timeline, scope, predicted=timeline, ink="#000000") for scope in get_args(gantt.Scope)),
    )  # fmt: skip
    shown = [said for figure in figures for said in texts_of(figure)]
    for said in shown:
        ours = re.sub(r"</?b>|<br>|<extra></extra>", "", said)
        assert "<" not in ours, said
        assert "<b>bold" not in said, said
        assert "%{evil}" not in said, said
    as_seen = {unescape(said).strip() for said in shown}
    assert {text, f"{text} {text}"} <= as_seen, "as it is, for who looks"


@pytest.mark.parametrize(
    "text",
    ["www.evil.test", "WWW.evil.test", "see http://evil.test/", "https://evil.test", "ftp://evil.test", "a@evil.test"],
)
def test_a_bare_address_is_no_link_in_markdown(text: str) -> None:
    said = markup.plain(text).replace("\\", "")  # the frontend looks for addresses where escapes are gone
    assert not re.search(r"(?i)www\.|[a-z]://|[a-z0-9]@", said)
    assert said.replace("\u2060", "") == text


@pytest.mark.parametrize("text", [":material/home:", ":home:", "a :smile: b", ":+1:"])
def test_the_name_of_a_picture_is_text_in_markdown(text: str) -> None:
    said = markup.plain(text).replace("\\", "")
    assert not re.search(r":[\w+-]+(/[\w+-]+)?:", said)
    assert said.replace("\u2060", "") == text


@pytest.mark.slow
def test_the_policy_keeps_other_hosts_away_even_if_markup_got_through(view: str, browser: Browser) -> None:
    context = browser.new_context()
    sign_in(context, view)
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
        assert answer.status_code == 403, name
        assert "is not signed in" in answer.text, name
    cookie, value = session(view)
    answer = ask.get(view, headers={"Cookie": f"{cookie}={value}"})
    assert answer.status_code == 200
    assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    assert ask.get(view, headers={"Host": "[::1"}).status_code == 400
    assert ask.get(view, headers={"Origin": "http://[::1"}).status_code == 400


def test_a_websocket_with_another_host_or_origin_is_refused(view: str) -> None:
    stream = view.replace("http", "ws") + "/_stcore/stream"
    cookie = "=".join(session(view))

    def status(**headers: str) -> int:
        try:
            with connect(stream, additional_headers={"Cookie": cookie, **headers}, proxy=None):
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
        f"Cookie: {cookie}\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    with socket.create_connection((host, port)) as rebound:  # as after DNS rebinding: both name the other site
        rebound.sendall(request.encode())
        assert rebound.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 403")


def test_names_that_were_allowed_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Headers({"host": "tide.example.com"})
    assert request_guard.refused(asked) is not None
    monkeypatch.setenv(HOSTS_VARIABLE, "other.example.com, Tide.example.com")
    assert request_guard.refused(asked) is None
    assert request_guard.refused(Headers({"host": "evil.test"})) is not None
    monkeypatch.setenv(HOSTS_VARIABLE, "*")
    assert request_guard.refused(Headers({"host": "evil.test"})) is None
    assert request_guard.refused(Headers({"host": "[bad"})) is not None
