"""The HTTP client: where it looks for daemon and token, and what it makes of what goes wrong."""

from __future__ import annotations

import gzip
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from tests.daemon.live import Agent, Daemon, hello, listen, new_run, step_report, threaded
from tests.hostile import hostile, plain, trickling
from tidegate.client.answers import CompleteAnswer, parse
from tidegate.client.daemon_client import MAX_BODY_BYTES, DaemonClient
from tidegate.client.discovery import DEFAULT_URL, find_daemon, find_token, state_dir
from tidegate.errors import DaemonError, DaemonUnreachable, NotAuthorized, NotFound
from tidegate.wire.agent import AgentReport, Directive, Lease, ProcessId
from tidegate.wire.evidence import ModelEvidence
from tidegate.wire.timeline import PhaseRow, SpanRow, TimelineView


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TIDEGATE_TOKEN", "TIDEGATE_READ_TOKEN", "TIDEGATE_OPERATE_TOKEN", "TIDEGATE_AGENT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TIDEGATE_DAEMON", raising=False)
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with threaded(tmp_path_factory.mktemp("state")) as running:
        yield running


def test_state_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TIDEGATE_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_dir() == tmp_path / "tidegate"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_dir() == Path.home() / ".local/state/tidegate"


def test_find_token(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_token("operate") is None
    (state / "operate.token").write_text("from-file\n")
    assert (find_token("operate"), find_token("read"), find_token("agent")) == ("from-file", "from-file", None)
    monkeypatch.setenv("TIDEGATE_TOKEN", "from-environment")
    assert (find_token("operate"), find_token("agent")) == ("from-environment", "from-environment")
    monkeypatch.setenv("TIDEGATE_AGENT_TOKEN", "for-agents")
    assert (find_token("operate"), find_token("agent")) == ("from-environment", "for-agents")


def test_find_daemon(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_daemon() == DEFAULT_URL
    for broken in ("", "{}", "[]", "null"):
        (state / "daemon.json").write_text(broken)
        assert find_daemon() == DEFAULT_URL
    (state / "daemon.json").write_text(json.dumps({"url": "http://127.0.0.1:1"}))
    assert find_daemon() == "http://127.0.0.1:1"
    monkeypatch.setenv("TIDEGATE_DAEMON", "http://head:8790")
    assert find_daemon() == "http://head:8790"


@pytest.mark.parametrize("url", ["", "127.0.0.1:8790", "ftp://head", "http://"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(DaemonError, match="give http://host:port"):
        DaemonClient(url)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_nobody_there() -> None:
    with DaemonClient(f"http://127.0.0.1:{free_port()}", "token") as client:
        assert not client.health()
        with pytest.raises(
            DaemonUnreachable, match=r"No daemon answers at .* Start the first one with `tidegate daemon`"
        ):
            client.runs()
        with pytest.raises(DaemonUnreachable):
            next(client.events("run"))


def test_somebody_who_says_nothing() -> None:
    with listen() as silent, DaemonClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2) as client:
        begin = time.monotonic()
        with pytest.raises(DaemonUnreachable, match="did not answer: no answer in time"):
            client.runs()
        assert time.monotonic() - begin < 3.0


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"hello\r\n"])
def test_somebody_else(answer: bytes) -> None:
    def serve() -> None:
        peer, _ = other.accept()
        with peer:
            peer.recv(65_536)
            peer.sendall(answer)

    with listen() as other, DaemonClient(f"http://127.0.0.1:{other.getsockname()[1]}") as client:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(DaemonError, match=r"not a Tidegate daemon|did not answer"):
            client.runs()
        thread.join(5)


@pytest.mark.parametrize(
    ("token", "said"),
    [(None, "A token is needed"), ("tide_wrong", "does not know this token"), ("two\nlines", "copy it again")],
)
def test_not_authorized(daemon: Daemon, token: str | None, said: str) -> None:
    with pytest.raises(NotAuthorized, match=said), DaemonClient(daemon.url, token) as client:
        client.runs()


def test_the_wrong_scope(daemon: Daemon) -> None:
    with pytest.raises(NotAuthorized, match=r"The token has scope read; PATCH .* needs operate"):
        daemon.client("read").set_knobs("any", {"stride": 3}, generation=0)


def test_a_proxy_is_not_asked_for_our_own_machine(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with DaemonClient(daemon.url) as client:
        assert client.health()


def test_a_report_that_is_too_large_loses_what_is_least_needed(daemon: Daemon) -> None:
    agent = Agent(daemon, new_run())
    span = SpanRow(op=10**9, kind="k" * 64, lane="l" * 64, subgroup=10**9, start=0.1, end=0.2, nbytes=1, numel=1)
    phases = (PhaseRow(phase="update", start=0.0, end=1.0),)
    large = TimelineView(step=1, source="measured", origin=0.0, phases=phases, spans=(span,) * 4_000, num_spans=4_000)
    assert len(large.model_dump_json()) < MAX_BODY_BYTES
    assert agent.say(timeline=large), "the largest that the wire allows, with the shortest numbers, fits"
    many = {f"{'x' * 58}{n:06}": 1.0 for n in range(100)}
    steps = tuple(step_report(n).model_copy(update={"cpu_seconds": many}) for n in range(1, 257))
    agent.say(step=256, steps=steps, timeline=large.model_copy(update={"step": 2}))
    kept = daemon.client().steps(agent.message.run, 0).steps
    timeline = daemon.client().timeline(agent.message.run, 0)
    assert timeline is not None
    assert (timeline.step, kept[-1].step) == (1, 256)
    assert 50 < len(kept) < 256


def test_threads_may_share_it(daemon: Daemon) -> None:
    client, found = daemon.client(), list[int]()
    threads = [threading.Thread(target=lambda: found.append(len(client.runs()) >= 0)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [1] * 16


@pytest.mark.parametrize("name", ["a/b", "..", "x?y", "x#y", "x%2Fy", "é"])
def test_odd_names_are_names(daemon: Daemon, name: str) -> None:
    with pytest.raises(NotFound):
        daemon.client().run(name)


class OlderDaemon(BaseHTTPRequestHandler):
    """Knows no `process`, no `replaces` and no `evidence`, and refuses what it does not know, as all of protocol 2
    do."""

    heard: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.heard.append(message)
        new = sorted({"process", "replaces", "evidence"} & message.keys())
        problem = {"type": "invalid-message", "status": 422, "detail": f"The message is not valid: body.{new}."}
        lease = Lease(lease_seconds=10.0, directive=Directive(committed=0, committed_knobs={}))
        body = json.dumps(problem) if new else lease.model_dump_json()
        self.send_response(422 if new else 201)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


def test_an_older_daemon_is_greeted_as_it_understands() -> None:
    server = HTTPServer(("127.0.0.1", 0), OlderDaemon)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    process = ProcessId(boot="b", namespace="pid:[1]", pid=2, started=3)
    try:
        with DaemonClient(f"http://127.0.0.1:{server.server_port}", "token") as client:
            assert client.hello(hello("llama", process=process)).lease_seconds == 10.0
            evidence = ModelEvidence(backward_seconds=1.0)
            report = AgentReport(timestamp=1.0, step=1, phase="other", generation=0, effective={}, evidence=evidence)
            for _ in range(2):
                assert client.report("a", report).lease_seconds == 10.0
    finally:
        server.shutdown()
        server.server_close()
    first, second, *reports = OlderDaemon.heard
    assert first["process"]["pid"] == 2
    assert first.keys() - second.keys() == {"process", "replaces"}
    assert ["evidence" in sent for sent in reports] == [True, False, False], "it is asked once"


def test_fields_of_a_newer_daemon_are_left_out(daemon: Daemon) -> None:
    """In the answer and in what it holds; what is missing or wrong is refused as before."""
    agent = Agent(daemon, new_run())
    run = daemon.client().run(agent.message.run)
    known = run.model_dump(mode="json")
    newer = {**known, "weather": "fair", "ranks": [{**rank, "mood": 1} for rank in known["ranks"]]}
    assert known["ranks"]
    assert parse(type(run), CompleteAnswer(200, json.dumps(newer).encode(), "GET /v1/runs/x")) == run
    with pytest.raises(DaemonError, match="not a Tidegate daemon"):
        parse(type(run), CompleteAnswer(200, json.dumps({"weather": "fair"}).encode(), "GET /v1/runs/x"))


def bomb(connection: socket.socket) -> None:
    """Eight megabytes that are eight kilobytes while they travel."""
    content = gzip.compress(b" " * 8_000_000)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)


def test_answers_have_bounds() -> None:
    answers = [plain(b" " * 300_000), bomb, plain(b"[" * 90_000), plain(b" " * 300_000, 500)]
    with (
        hostile(lambda _, number: answers[number]) as daemon,
        DaemonClient(daemon.url, "t", max_answer_bytes=100_000) as client,
    ):
        with pytest.raises(DaemonError, match="more than 100,000 bytes"):
            client.runs()
        with pytest.raises(DaemonError, match="is compressed"):
            client.runs()
        with pytest.raises(DaemonError, match="not a Tidegate daemon"):
            client.runs()
        with pytest.raises(DaemonError, match="more than 100,000 bytes"):
            client.runs()


def test_events_have_bounds() -> None:
    stream = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    endless = stream + "Content-Length: 9000000\r\n\r\ndata: " + "a" * 2_000_000
    answers = [
        trickling(endless.encode()), plain("data: {}\n"), bomb, plain("", headers="Tidegate-Newest-Event: ten\r\n")
    ]  # fmt: skip
    with hostile(lambda _, number: answers[number]) as daemon, DaemonClient(daemon.url, "t") as client:
        with pytest.raises(DaemonError, match="over 1,048,576 bytes"):
            next(client.events("run"))
        with pytest.raises(DaemonError, match="not a Tidegate daemon"):
            next(client.events("run"))
        with pytest.raises(DaemonError, match="is compressed"):
            next(client.events("run"))
        with pytest.raises(DaemonError, match="not a Tidegate daemon"):
            client.newest_event("run")


def test_an_exchange_ends_in_time_however_slow_the_other_side_is() -> None:
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # it takes what fits into the buffers of the sockets
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with DaemonClient(url, "t", timeout=0.2) as client, pytest.raises(DaemonUnreachable, match="in time"):
            client._transport.send("POST", "/v1/agents", body="a" * 50_000_000)
    with (
        hostile(lambda *_: trickling(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n")) as daemon,
        DaemonClient(daemon.url, "t", timeout=0.2) as client,
        pytest.raises(DaemonUnreachable, match="in time"),
    ):
        client.runs()
    assert time.monotonic() - began < 10.0


def test_a_proxy_of_the_environment_is_used_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    with hostile(lambda *_: plain([])) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("http://", "http://user:word@"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with DaemonClient("http://head.example:8790", "t") as client:
            assert client.runs() == []
        assert proxy.asked == ["GET http://head.example:8790/v1/runs HTTP/1.1"]
        monkeypatch.setenv("no_proxy", "head.example")
        with DaemonClient("http://head.example:8790", "t") as client, pytest.raises(DaemonUnreachable):
            client.runs()
