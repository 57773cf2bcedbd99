"""A real daemon, in a thread or as a process, and agents that do what a test tells them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests import forked
from tests.services import PATIENCE
from tidegate.client.daemon_client import DaemonClient
from tidegate.client.discovery import SCOPES
from tidegate.client.state_files import home_of
from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.server.app import create_app
from tidegate.daemon.server.main import make_server
from tidegate.wire.agent import AgentHello, AgentReport, Applied, Directive, Lease, Vote
from tidegate.wire.step import StepReport

ROOT = Path(__file__).parents[2]
BARE = httpx.Client(trust_env=False, timeout=10.0, limits=httpx.Limits(max_keepalive_connections=0))
"""Making one takes longer than a request; each request has a connection of its own, as curl's."""


def wait_until(true: Callable[[], Any], what: str, seconds: float = 10.0) -> Any:
    """What `true()` gives once it is true; fails naming `what` after the deadline."""
    deadline, pause = time.monotonic() + PATIENCE * seconds, threading.Event()
    while not (found := true()):
        assert time.monotonic() < deadline, f"never came: {what}"
        pause.wait(0.01)
    return found


def new_run() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"


@dataclass
class Daemon:
    """A daemon that runs. `tokens` by scope."""

    url: str
    state: Path
    tokens: dict[str, str]
    app: Any = None
    clients: list[DaemonClient] = field(default_factory=list)

    def client(self, scope: str = "operate", timeout: float = 10.0) -> DaemonClient:
        client = DaemonClient(self.url, self.tokens[scope], timeout)
        self.clients.append(client)
        return client

    def http(self, method: str, path: str, scope: str | None = "operate", **more: Any) -> httpx.Response:
        """One bare request, as curl would make it."""
        headers = {"Authorization": f"Bearer {self.tokens[scope]}"} if scope else {}
        headers |= more.pop("headers", {})
        return BARE.request(method, self.url + path, headers=headers, **more)


def file_tokens(state: Path) -> dict[str, str]:
    """The tokens that the daemon wrote, by scope."""
    return {scope: (home_of(state) / f"{scope}.token").read_text().strip() for scope in SCOPES}


def listen(port: int = 0) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


@contextlib.contextmanager
def threaded(state: Path, **settings: Any) -> Iterator[Daemon]:
    """A uvicorn server in a thread, with a token of every scope."""
    made = Settings(state_dir=state, **settings)
    app = create_app(made)
    tokens = file_tokens(state)
    server = make_server(app, made)
    scheme, host = ("https", "localhost") if made.tls_certificate else ("http", "127.0.0.1")
    with listen() as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        daemon = Daemon(f"{scheme}://{host}:{listener.getsockname()[1]}", state, tokens, app)
        try:
            with DaemonClient(daemon.url, ca=made.tls_certificate) as client:
                wait_until(client.health, "a ready daemon")
            yield daemon
        finally:
            for client in daemon.clients:
                client.close()
            server.should_exit = True
            thread.join(10)
    assert not thread.is_alive(), "the daemon did not end"


@dataclass
class Process:
    """`tidegate daemon` as users start it."""

    state: Path
    arguments: tuple[str, ...] = ("--port", "0")
    process: subprocess.Popen[str] | None = None
    started: list[Daemon] = field(default_factory=list)

    def start(self, keep: bool = False, ca: Path | None = None) -> Daemon:
        """`keep`: the announcement of another daemon stays, and is not waited for. `ca`: whom to trust."""
        if not keep:
            (home_of(self.state) / "daemon.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "tidegate", "daemon", "--state-dir", str(self.state), *self.arguments]
        self.process = forked.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(self.state)
        )
        announced = lambda: not keep and (home_of(self.state) / "daemon.json").exists()  # noqa: E731
        wait_until(lambda: announced() or self.process.poll() is not None, "daemon.json", 20)  # type: ignore[union-attr]
        assert self.process.poll() is None, self.process.communicate()[0]
        url = json.loads((home_of(self.state) / "daemon.json").read_text())["url"]
        daemon = Daemon(url, self.state, file_tokens(self.state))
        self.started.append(daemon)
        with DaemonClient(url, ca=ca) as client:
            wait_until(client.health, "a ready daemon", 20)
        return daemon

    def end(self, signal: int) -> tuple[int, float, str]:
        """Exit code, seconds it took, and all that it printed."""
        assert self.process is not None
        begin = time.monotonic()
        self.process.send_signal(signal)
        text, _ = self.process.communicate(timeout=PATIENCE * 20)
        return self.process.returncode, time.monotonic() - begin, text

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        for client in (client for daemon in self.started for client in daemon.clients):
            client.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def environment(state: Path, **more: str) -> dict[str, str]:
    """This process's, without what would lead a child to another daemon."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    return {**kept, "TIDEGATE_STATE_DIR": str(state), "COLUMNS": "200", **more}


def hello(run: str, rank: int = 0, **more: Any) -> AgentHello:
    made: dict[str, Any] = {
        "agent": uuid.uuid4().hex,
        "run": run,
        "rank": rank,
        "world_size": 2,
        "host": "node",
        "pid": 4711,
        "device_kind": "emulated",
        "metrics_address": f"127.0.0.1:{9400 + rank}",
        "knobs": {"stride": 2.0, "static_ratio": 0.0},
        "started_at": time.time(),
    }
    return AgentHello(**{**made, **more})


class Agent:
    """One rank. It answers proposals only while `answering()`, or when told to."""

    def __init__(self, daemon: Daemon, run: str, rank: int = 0, **more: Any) -> None:
        self.message = hello(run, rank, **more)
        self.id = self.message.agent
        self.client = daemon.client("agent")
        self.step = 0
        self.generation = 0
        self.refuse = ""
        self.take(self.client.hello(self.message).directive)

    def take(self, directive: Directive) -> None:
        if directive.committed > self.generation:
            self.generation = directive.committed
            self.say(applied=Applied(generation=self.generation, step=self.step + 1))

    def begin(self) -> Agent:
        """Tells that it runs with generation 0 from its first step on."""
        self.say(applied=Applied(generation=0, step=1))
        return self

    def say(self, **more: Any) -> Lease:
        made = {"timestamp": time.time(), "step": self.step, "phase": "forward", "effective": {"stride": 3.0}}
        return self.client.report(self.id, AgentReport(**{**made, "generation": self.generation, **more}))

    def train(self, num_steps: int, update_seconds: float) -> None:
        first = self.step + 1
        self.step += num_steps
        self.say(steps=tuple(step_report(n, update_seconds) for n in range(first, self.step + 1)))

    def vote(self, generation: int, reason: str = "") -> None:
        self.client.vote(self.id, Vote(generation=generation, can=not reason, reason=reason))

    def answer(self, wait: float = 5.0, seen: int | None = None) -> Directive:
        """Waits for something new and does as it is told."""
        directive = self.client.directive(self.id, self.generation, seen, wait)
        if directive.proposed is not None:
            self.vote(directive.proposed, self.refuse)
        self.take(directive)
        return directive

    @contextlib.contextmanager
    def answering(self) -> Iterator[Agent]:
        end = threading.Event()

        def loop() -> None:
            while not end.is_set():
                self.answer(wait=0.2)

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield self
        finally:
            end.set()
            thread.join(10)


def step_report(step: int, update_seconds: float = 1.0) -> StepReport:
    return StepReport(step=step, timestamp=time.time(), phase_seconds={"forward": 0.1, "update": update_seconds})
