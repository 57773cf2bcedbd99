"""Connections that show no token: however many there are and whatever they send, those with a token are served."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.live import ROOT, Agent, Daemon, Process, environment, file_tokens, new_run, threaded, wait_until
from tests.daemon.security.test_tokens import certificate_for
from tests.services import PATIENCE
from tidegate.client.daemon_client import DaemonClient
from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.security.connections import WHY, ConnectionLimiter
from tidegate.daemon.server import main
from tidegate.daemon.server.http_protocol import Protocol
from tidegate.metrics.family import REFUSALS

SECONDS = 1.0
DESCRIPTORS = 1_024
SILENT = 1_200
_LOWERED = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {DESCRIPTORS}))
from tidegate.cli.main import main
sys.argv[0] = "tidegate"
main()
"""


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that gives a connection a second to show a token."""
    with threaded(tmp_path_factory.mktemp("short"), request_seconds=SECONDS) as daemon:
        yield daemon


@contextlib.contextmanager
def few_descriptors(state: Path) -> Iterator[tuple[Daemon, Process]]:
    """A daemon that is started with 256 descriptors, and may have 1,024."""
    process = Process(state)
    command = [sys.executable, "-c", _LOWERED, "daemon", "--port", "0", "--state-dir", str(state)]
    with process:
        process.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(state)
        )
        wait_until((state / "daemon.json").exists, "a daemon", 60)
        url = re.search(r'"url": "(.*?)"', (state / "daemon.json").read_text())
        assert url is not None
        daemon = Daemon(url[1], state, file_tokens(state))
        process.started.append(daemon)
        wait_until(daemon.client().health, "a ready daemon", 20)
        yield daemon, process


def connect(daemon: Daemon) -> socket.socket:
    host, _, port = daemon.url.rpartition("//")[2].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE * 10)


def is_closed(connection: socket.socket) -> bool:
    """Whether the daemon has closed it; what it said before is read."""
    connection.setblocking(False)
    try:
        while connection.recv(65_536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def refused(daemon: Daemon, reason: str) -> float:
    text = daemon.http("GET", "/metrics", None).text
    found = re.search(rf'^tidegate_refused_connections_total{{reason="{reason}"}} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_silent_sockets_take_no_descriptors_from_those_with_a_token(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * SILENT)), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        daemon, process = stack.enter_context(few_descriptors(tmp_path))
        agent = Agent(daemon, "llama")
        idle = [stack.enter_context(connect(daemon)) for _ in range(SILENT)]
        begin = time.monotonic()
        assert agent.say().directive.committed == 0  # on the connection that it had
        assert [run["run"] for run in daemon.http("GET", "/v1/runs").json()] == ["llama"]
        assert Agent(daemon, "llama", rank=1).say() is not None
        assert time.monotonic() - begin < PATIENCE * 1.0
        gone = wait_until(lambda: refused(daemon, "evicted"), "evicted connections")
        assert gone >= SILENT - DESCRIPTORS
        assert sum(is_closed(connection) for connection in idle) >= SILENT - DESCRIPTORS
        files = len(list(Path(f"/proc/{process.process.pid}/fd").iterdir()))  # type: ignore[union-attr]
        assert 200 < files < DESCRIPTORS / 2
        text = process.end(signal.SIGTERM)[2]
    told = [line for line in text.splitlines() if "refused" in line]
    assert len(told) == 1, text
    assert "closed for newer connections; most of them from 127.0.0.1." in told[0]
    assert "224 without a valid token (limit 224)" in told[0]


def test_without_a_descriptor_the_daemon_waits_and_serves_who_is_connected(tmp_path: Path) -> None:
    with Process(tmp_path) as process, contextlib.ExitStack() as stack:
        daemon = process.start()
        agent, pid = Agent(daemon, "llama"), process.process.pid  # type: ignore[union-attr]
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = 1 + max(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, limits[1]))
        for _ in range(20):
            stack.enter_context(connect(daemon))
        begin, spent = time.monotonic(), cpu_seconds(pid)
        for _ in range(20):
            assert agent.say().directive.committed == 0
            threading.Event().wait(0.05)
        assert cpu_seconds(pid) - spent < (time.monotonic() - begin) / 2, "it spins"
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert daemon.http("GET", "/v1/runs").status_code == 200
        assert refused(daemon, "descriptors") > 0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_silent_socket_is_closed(short: Daemon) -> None:
    before = refused(short, "deadline")
    with connect(short) as connection:
        begin = time.monotonic()
        assert connection.recv(1) == b""
        assert time.monotonic() - begin < PATIENCE * 2 * SECONDS
    assert refused(short, "deadline") == before + 1


@pytest.mark.parametrize("head", [b"GET /healthz", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_a_request_that_trickles_is_cut(short: Daemon, head: bytes) -> None:
    end = time.monotonic() + PATIENCE * 5 * SECONDS
    with connect(short) as connection:
        connection.sendall(head)
        connection.settimeout(SECONDS / 10)
        said, was_reset = b"", False
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                try:
                    found = connection.recv(4_096)
                except ConnectionResetError:  # bytes that it had not read: the kernel may drop the answer with them
                    was_reset = True
                    break
                if not found:
                    break
                said += found
            with contextlib.suppress(OSError):
                connection.sendall(b"X")
    assert time.monotonic() < end, "still open"
    assert said.startswith(b"HTTP/1.1 408 ") or (was_reset and not said), said


def test_a_body_without_a_token_is_no_way_to_stay(short: Daemon) -> None:
    """Neither of a route that is closed nor of one that is open to all."""
    for path in ("/v1/runs", "/healthz"):
        end = time.monotonic() + PATIENCE * 5 * SECONDS
        with connect(short) as connection, contextlib.suppress(OSError):
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n".encode())
            while time.monotonic() < end and not is_closed(connection):
                connection.setblocking(True)
                connection.sendall(b"x")
                threading.Event().wait(0.05)
        assert time.monotonic() < end, path


def test_an_answer_that_nobody_reads_is_no_way_to_stay(short: Daemon) -> None:
    with connect(short) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        ask = b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        connection.sendall(ask * 8)
        server = short.app.state.connections
        wait_until(lambda: not server.unauthorized, "a closed connection")


def test_requests_that_wait_for_answers_are_few(short: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends without end and reads nothing is no longer read: requests that wait take memory."""
    waiting: list[int] = []
    begin = Protocol.on_message_begin

    def begun(self: Protocol) -> None:
        waiting.append(len(self.pipeline))
        begin(self)

    monkeypatch.setattr(Protocol, "on_message_begin", begun)
    ask = b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + b"GET / HTTP/1.1\r\n\r\n" * 10_000
    with connect(short) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.setblocking(False)
        end = time.monotonic() + SECONDS / 2
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                connection.send(ask)
        assert 1 < max(waiting) < 100


def test_each_request_of_many_sent_at_once_is_answered(short: Daemon) -> None:
    many, ask = 2_000, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    last = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    said = b""
    with connect(short) as connection:
        sender = threading.Thread(target=connection.sendall, args=(ask * many + last,))
        sender.start()
        while found := connection.recv(65_536):
            said += found
        sender.join()
    assert said.count(b"HTTP/1.1 200 ") == many + 1


@pytest.mark.parametrize("between", [b"a: b\r\n", b"a"])
@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n",
    ],
    ids=["headers", "trailers"],
)
def test_endless_headers_are_cut(short: Daemon, head: bytes, between: bytes) -> None:
    before, sent, said = refused(short, "too-large"), 0, b""
    with connect(short) as connection:
        connection.sendall(head)
        with contextlib.suppress(OSError):
            while sent < 1 << 23:
                connection.sendall(between * 1_000)
                sent += 1_000 * len(between)
        with contextlib.suppress(OSError):
            while found := connection.recv(65_536):
                said += found
    assert sent < 1 << 23
    assert refused(short, "too-large") == before + 1
    assert not said or said.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 401 ", b"HTTP/1.1 405 ")), said


def test_one_large_head_is_refused(short: Daemon) -> None:
    answer = short.http("GET", "/v1/runs", headers={"X-Long": "x" * 100_000})
    assert (answer.status_code, answer.json()["type"]) == (431, "headers-too-large")
    assert "65536" in answer.json()["detail"]


def test_connections_with_a_token_stay(short: Daemon) -> None:
    """A poll, an event stream and a silence that last longer than others may take."""
    agent = Agent(short, new_run())
    head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {short.tokens['read']}\r\n"
    with connect(short) as stream, connect(short) as silent:
        stream.sendall(f"GET /v1/runs/{agent.message.run}/events HTTP/1.1\r\n{head}\r\n".encode())
        silent.sendall(f"GET /v1/runs HTTP/1.1\r\n{head}\r\n".encode())
        assert silent.recv(65_536).startswith(b"HTTP/1.1 200 ")
        begin = time.monotonic()
        agent.client.directive(agent.id, agent.generation, None, 2 * SECONDS)
        assert time.monotonic() - begin >= 2 * SECONDS
        assert not is_closed(stream)
        assert not is_closed(silent)


def test_a_handshake_counts(tmp_path: Path) -> None:
    certificate, key = certificate_for(tmp_path, "DNS:localhost")
    settings = {"request_seconds": SECONDS, "tls_certificate": certificate, "tls_key": key}
    with threaded(tmp_path / "state", **settings) as daemon, connect(daemon) as silent, connect(daemon) as trickling:
        trickling.sendall(b"\x16\x03\x01\x02\x00\x01")
        begin = time.monotonic()
        assert silent.recv(1) == b""
        wait_until(lambda: is_closed(trickling), "a closed connection")
        assert time.monotonic() - begin < PATIENCE * 2 * SECONDS
        context = ssl.create_default_context(cafile=str(certificate))
        with (
            context.wrap_socket(connect(daemon), server_hostname="localhost") as encrypted,
            contextlib.suppress(ConnectionError, ssl.SSLError),
        ):
            assert encrypted.recv(1) == b""  # silent after it
        with DaemonClient(daemon.url, daemon.tokens["read"], ca=certificate) as client:
            assert client.runs() == []
        limiter = daemon.app.state.connections
        wait_until(lambda: (limiter.unauthorized, limiter.authorized) == (0, 0), "closed connections")


def test_the_address_with_most_connections_loses_the_oldest() -> None:
    """Whoever opens many displaces his own; one more from elsewhere has its time."""
    closed: list[str] = []
    limiter = ConnectionLimiter(lambda reason: None, seconds=10.0, descriptors=1_024)
    honest = limiter.register("10.0.0.7", closed.append)
    for number in range(2 * limiter.unauthorized_limit):
        limiter.register(f"2001:db8::{number:x}", lambda reason, n=number: closed.append(str(n)))  # type: ignore[misc]
    assert limiter.unauthorized == limiter.unauthorized_limit
    assert closed[:3] == ["0", "1", "2"]
    assert limiter.authorize(honest)
    assert limiter.unauthorized == limiter.unauthorized_limit - 1


def test_every_reason_is_in_the_catalogue() -> None:
    assert tuple(WHY) == REFUSALS


def test_connections_with_a_token_have_a_bound_too() -> None:
    limiter = ConnectionLimiter(lambda reason: None, seconds=10.0, descriptors=200)
    taken = [limiter.register("10.0.0.7", lambda reason: None) for _ in range(1)]
    while limiter.authorize(taken[-1]):
        taken.append(limiter.register("10.0.0.7", lambda reason: None))
    assert len(taken) == limiter.capacity + 1
    limiter.unregister(taken[0])
    assert limiter.authorize(taken[-1])


def test_too_few_descriptors_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr(main, "descriptor_limit", lambda: 12)
    monkeypatch.setattr(main, "create_app", lambda _: pytest.fail("it started"))
    assert main.serve(Settings(state_dir=tmp_path, port=0)) == 1
    assert "may open 12 files and connections, but the daemon needs at least 64" in capsys.readouterr().err
