"""A token of the state directory goes to nobody but its daemon, whoever has taken the port."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import forked
from tests.daemon.live import BARE, ROOT, Daemon, Process, environment, listen, threaded
from tidegate.client.daemon_client import DaemonClient
from tidegate.client.daemon_proof import FromState, read_key, sign
from tidegate.client.discovery import find_daemon, find_token
from tidegate.errors import DaemonUnproven

GIVEN = ("TIDEGATE_DAEMON", "TIDEGATE_TOKEN", "TIDEGATE_TOKEN_DIR", "TIDEGATE_OPERATE_TOKEN", "TIDEGATE_READ_TOKEN")


@dataclass
class Impostor:
    """What took the daemon's port; it keeps all that it is told."""

    port: int
    told: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def saw_a_token(self) -> bool:
        return b"authorization" in b"".join(self.told).lower()


def answer_of(text: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


@contextlib.contextmanager
def impostor(answer: Callable[[bytes], bytes], port: int = 0) -> Iterator[Impostor]:
    """Answers each request on a connection, one after the other."""
    connections: list[socket.socket] = []

    def serve(peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while request := peer.recv(65_536):
                made.told.append(request)
                peer.sendall(answer(request))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listening.accept()
                connections.append(peer)
                threading.Thread(target=serve, args=(peer,), daemon=True).start()

    with listen(port) as listening:
        made = Impostor(listening.getsockname()[1])
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield made
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for connection in connections:
                connection.close()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given by the environment."""
    for name in GIVEN:
        monkeypatch.delenv(name, raising=False)


def says_yes(_: bytes) -> bytes:
    return answer_of("[]")


def is_older(_: bytes) -> bytes:
    return answer_of('{"type": "no-token", "detail": "A token is needed"}', "401 Unauthorized")


def guesses(_: bytes) -> bytes:
    return answer_of(json.dumps({"proof": "0" * 64}))


def sends_no_end(_: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n" + b"x" * 60_000


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("answer", [says_yes, is_older, guesses, sends_no_end])
def test_after_kill_9_who_took_the_port_sees_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[[bytes], bytes]
) -> None:
    state = tmp_path / "state"
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(state))
    with Process(state) as process:
        daemon = process.start()
        kept = DaemonClient(find_daemon(), find_token("operate"))
        assert kept.runs() == []
        process.end(signal.SIGKILL)
    port = int(daemon.url.rpartition(":")[2])
    assert find_daemon() == daemon.url
    with kept, impostor(answer, port) as other:
        for words in (("status",), ("knobs", "set", "stride=3", "--run", "llama")):
            command = [sys.executable, "-m", "tidegate", *words]
            done = forked.run(command, timeout=60, cwd=ROOT, env=environment(state))
            assert done.returncode == 1, done.stdout
            assert "does not prove to be the daemon of" in done.stderr, done.stderr
            assert "no token was sent" in done.stderr
        with pytest.raises(DaemonUnproven):
            kept.runs()  # on a new connection: the old one went with the daemon
        assert other.told, "it was asked"
        assert not other.saw_a_token, other.told
    with Process(state, ("--port", str(port))) as process:
        process.start()
        with DaemonClient(find_daemon(), find_token("operate")) as client:
            assert client.runs() == []


@pytest.mark.usefixtures("bare")
def test_who_passes_on_what_both_say_proves_nothing(tmp_path: Path) -> None:
    with threaded(tmp_path) as daemon:

        def passes_on(request: bytes) -> bytes:
            return answer_of(BARE.get(daemon.url + request.split()[1].decode()).text)

        with impostor(passes_on) as other:
            with (
                DaemonClient(other.url, FromState.of(daemon.tokens["operate"], tmp_path)) as client,
                pytest.raises(DaemonUnproven),
            ):
                client.runs()
            assert b"".join(other.told).startswith(b"GET /v1/proof?nonce=")
            assert not other.saw_a_token


@pytest.mark.usefixtures("bare")
def test_no_proof_without_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of an earlier version, or a token that was copied without it: nobody can prove anything."""
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path / "copied"))
    (tmp_path / "copied").mkdir()
    with threaded(tmp_path / "state") as daemon:
        (tmp_path / "copied" / "operate.token").write_text(daemon.tokens["operate"])
        token = find_token("operate")
        assert isinstance(token, FromState)
        with DaemonClient(daemon.url, token) as client, pytest.raises(DaemonUnproven, match="TIDEGATE_TOKEN_DIR"):
            client.runs()
        monkeypatch.setenv("TIDEGATE_TOKEN_DIR", str(tmp_path / "copied"))
        with DaemonClient(daemon.url, find_token("operate")) as client:
            assert client.runs() == []


@pytest.mark.usefixtures("bare")
def test_what_is_named_by_hand_is_asked_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("TIDEGATE_OPERATE_TOKEN", "given")
    with impostor(says_yes) as other:
        monkeypatch.setenv("TIDEGATE_DAEMON", other.url)
        with DaemonClient(find_daemon(), find_token("operate")) as client:
            assert client.runs() == []
        assert len(other.told) == 1
        assert other.saw_a_token


@pytest.mark.usefixtures("bare")
def test_an_address_of_the_state_directory_needs_proof_whatever_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("TIDEGATE_OPERATE_TOKEN", "given")
    with impostor(says_yes) as other:
        (tmp_path / "daemon.json").write_text(json.dumps({"url": other.url}))
        with DaemonClient(find_daemon(), find_token("operate")) as client, pytest.raises(DaemonUnproven):
            client.runs()
        assert not other.saw_a_token


def test_the_proof_is_of_nonce_and_address(daemon: Daemon) -> None:
    key, port = read_key(daemon.state), int(daemon.url.rpartition(":")[2])
    assert re.fullmatch("[0-9a-f]{64}", key)
    nonce = "ab" * 16
    answer = BARE.get(f"{daemon.url}/v1/proof", params={"nonce": nonce})
    assert answer.json() == {"proof": sign(key, nonce, "127.0.0.1", port)}
    assert sign(key, nonce, "::ffff:127.0.0.1", port) == sign(key, nonce, "127.0.0.1", port)
    for host, other_port in (("127.0.0.2", port), ("127.0.0.1", port + 1)):
        assert sign(key, nonce, host, other_port) != answer.json()["proof"]
    for wrong in ("", "ab", "g" * 32, "a" * 129, urllib.parse.quote("é" * 32)):
        assert BARE.get(f"{daemon.url}/v1/proof?nonce={wrong}").status_code == 422


@pytest.mark.usefixtures("bare")
def test_a_secret_that_a_client_cannot_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "proof.key").mkdir()
    assert read_key(tmp_path) == ""
