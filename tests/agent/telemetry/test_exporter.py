"""A rank's /metrics against clients that do harm: training keeps its threads, its descriptors and its stderr."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from tests.services import ROOT, until
from tidegate.agent.telemetry import exporter
from tidegate.agent.telemetry.exporter import CONNECTIONS, Exporter


class Figures:
    def text(self, openmetrics: bool) -> bytes:
        return b"one 1\n"


@pytest.fixture
def serving() -> Iterator[Exporter]:
    figures = Figures()
    made = Exporter(figures.text, {"exporter": 0.0}, "127.0.0.1", 0)
    yield made
    made.close()
    del figures


def scrape(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        content: bytes = answer.read()
        return content


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def test_silent_connections_take_few_threads_and_hold_up_no_scrape(serving: Exporter) -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as all_of_them:
        for _ in range(12):
            all_of_them.enter_context(connect(serving.port))
        assert scrape(serving.port) == b"one 1\n"
        assert threading.active_count() - before <= CONNECTIONS
        assert len(serving._server._open) <= CONNECTIONS
    assert scrape(serving.port) == b"one 1\n"


def test_a_connection_that_trickles_is_cut_off(serving: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "CONNECTION_SECONDS", 0.3)
    ended = threading.Event()
    with connect(serving.port) as slow:

        def trickle() -> None:
            with contextlib.suppress(OSError):
                slow.sendall(b"GET /metrics HTTP/1.1\r\n")
                while not ended.wait(0.02):
                    slow.sendall(b"a")

        sender = threading.Thread(target=trickle)
        sender.start()
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(1) == b""
        ended.set()
        sender.join()


def test_who_leaves_early_leaves_no_trace(serving: Exporter, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n", b"\x16\x03\x01 no HTTP\r\n\r\n"):
        with connect(serving.port) as leaving:
            leaving.sendall(words)
            leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
    assert scrape(serving.port) == b"one 1\n"
    until(lambda: not serving._server._open, "all connections to end")
    assert capfd.readouterr().err == ""


def test_what_fails_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def text(self, openmetrics: bool) -> bytes:
            raise ZeroDivisionError

    broken = Broken()
    made = Exporter(broken.text, {"exporter": 0.0}, "127.0.0.1", 0)
    try:
        for _ in range(3):
            with pytest.raises(http.client.RemoteDisconnected):
                scrape(made.port)
        until(lambda: not made._server._open, "all connections to end")
    finally:
        made.close()
    assert [record.getMessage() for record in caplog.records] == ["a scrape of /metrics failed"]


def test_connections_that_could_not_be_accepted_leave_room_for_those_that_follow(
    serving: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "PAUSE_SECONDS", 0.01)
    failures = iter([OSError(errno.EMFILE, "too many open files")] * (CONNECTIONS + 2))
    accept = socketserver.TCPServer.get_request

    def fail_first(server: socketserver.TCPServer) -> tuple[socket.socket, object]:
        if error := next(failures, None):
            raise error
        return accept(server)

    monkeypatch.setattr(socketserver.TCPServer, "get_request", fail_first)
    assert scrape(serving.port) == b"one 1\n"
    assert next(failures, None) is None


EXHAUSTED = """
import os, resource, socket, threading, time
from tests.agent.telemetry.test_exporter import Figures, scrape
from tidegate.agent.telemetry.exporter import Exporter
from tidegate.errors import ConfigError
figures = Figures()
made = Exporter(figures.text, {"exporter": 0.0}, "127.0.0.1", 0)
client = socket.socket()
held = []
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
client.connect(("127.0.0.1", made.port))
before = time.process_time()
threading.Event().wait(1.5)
spent = time.process_time() - before
try:
    Exporter(figures.text, {"exporter": 0.0}, "127.0.0.1", 0)
except ConfigError as error:
    refusal = str(error)
for one in held:
    os.close(one)
client.close()
assert scrape(made.port) == b"one 1\\n"
assert spent < 0.3, spent
assert refusal.endswith("Too many open files. Raise the limit of open files (ulimit -n)."), refusal
made.close()
"""


@pytest.mark.slow
def test_without_descriptors_it_waits_and_does_not_spin() -> None:
    done = subprocess.run([sys.executable, "-c", EXHAUSTED], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
