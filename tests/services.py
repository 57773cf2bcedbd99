"""Real services for tests: daemon, Prometheus and Alertmanager as processes of their own, on free ports."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
import psutil

from tests import forked
from tests.alerts.scaling import copy_scaled
from tidegate.client.daemon_client import DaemonClient
from tidegate.client.state_files import home_of

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")
PATIENCE = 4
"""How much slower than usual a machine may be before a wait fails. It costs nothing where what is awaited comes."""


FIRST_PORT, PORTS_PER_WORKER = 20_000, 700
"""Ports of the tests: below the kernel's ephemeral ports, PORTS_PER_WORKER of them for each pytest-xdist worker."""
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
_ports = itertools.count(os.getpid() % PORTS_PER_WORKER)


def free_port() -> int:
    """A port on which nothing listens. Successive calls return different ports; the kernel, asked for any port, may
    return the same one again."""
    for number in itertools.islice(_ports, PORTS_PER_WORKER):
        port = FIRST_PORT + _worker * PORTS_PER_WORKER + number % PORTS_PER_WORKER
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("Every port of this worker is in use.")


def until(found: Callable[[], T], what: str, seconds: float = 30.0) -> T:
    """Asks again and again until the answer is true, and gives it; fails naming `what` after a deadline."""
    deadline, pause = time.monotonic() + PATIENCE * seconds, threading.Event()
    while True:
        answer = found()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"never came within {PATIENCE * seconds:.0f} s: {what}"
        pause.wait(0.05)


class Resources(NamedTuple):
    """What this process holds of the system."""

    threads: int
    sockets: int
    descriptors: int
    """Sockets among them."""


def resources() -> Resources:
    """Those that are held now, without what only cycles of references hold."""
    gc.collect()
    me = psutil.Process()
    return Resources(threading.active_count(), len(me.net_connections("all")), me.num_fds())


def assert_nothing_grows(work: Callable[[int], object], rounds: int) -> None:
    """Does `work` twice, for what is made once and stays, then so many times: no more may be held afterwards."""
    for number in range(2):
        work(number)
    first = resources()
    for number in range(2, 2 + rounds):
        work(number)
    until(lambda: all(now <= was for now, was in zip(resources(), first, strict=True)), f"no more than {first}")


@contextlib.contextmanager
def meanwhile(*work: Callable[[threading.Event], object]) -> Iterator[None]:
    """Each of them in a thread of its own; leaving the block sets the event, at which they end, and waits for them."""
    end = threading.Event()
    threads = [threading.Thread(target=one, args=(end,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join(10)


def program(*names: str) -> str:
    """The first of these that is there: Debian has other names for some."""
    path = next(filter(None, map(shutil.which, names)), None)
    assert path, f"{names[0]} is not installed; as root, `make test` installs it (Debian packages prometheus*)."
    return path


@dataclass
class DaemonProcess:
    """`tidegate daemon` as a process that can be killed and started again on the same port and state."""

    port: int
    state: Path
    program: tuple[str, ...] = ("tidegate", "daemon")
    """Module and arguments."""
    process: subprocess.Popen[bytes] | None = None
    clients: list[DaemonClient] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def token(self, scope: str) -> str:
        return (home_of(self.state) / f"{scope}.token").read_text().strip()

    def client(self, scope: str = "operate") -> DaemonClient:
        client = DaemonClient(self.url, self.token(scope))
        self.clients.append(client)
        return client

    def start(self) -> None:
        command = [sys.executable, "-m", *self.program, "--port", str(self.port), "--state-dir", str(self.state)]
        self.process = forked.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: _ok(f"{self.url}/readyz"), "the daemon", 90)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def daemon_process(state: Path, *program: str) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(free_port(), state, program or DaemonProcess.program)
    try:
        daemon.start()
        yield daemon
    finally:
        for client in daemon.clients:
            client.close()
        daemon.kill()


@dataclass
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Rows of an instant query: labels and value."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, trust_env=False).json()
        assert answer["status"] == "success", answer
        return [{**row["metric"], "value": float(row["value"][1])} for row in answer["data"]["result"]]

    def ask(self, what: str, **params: str | float) -> Any:
        """The data of any GET of the HTTP API below /api/v1."""
        answer = httpx.get(f"{self.url}/api/v1/{what}", params=params, trust_env=False, timeout=20.0).json()
        assert answer["status"] == "success", (params, answer)
        return answer["data"]

    def value(self, expression: str) -> float | None:
        rows = self.query(expression)
        assert len(rows) <= 1, (expression, rows)
        return rows[0]["value"] if rows else None

    def alerts(self, name: str, state: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.url}/api/v1/alerts", trust_env=False).json()
        found = answer["data"]["alerts"]
        return [a for a in found if a["labels"]["alertname"] == name and a["state"] == state]


@dataclass
class Alertmanager:
    url: str

    def states(self, name: str) -> list[str]:
        """`active` or `suppressed` (inhibited), for each alert of that name."""
        answer = httpx.get(f"{self.url}/api/v2/alerts", trust_env=False).json()
        return [a["status"]["state"] for a in answer if a["labels"]["alertname"] == name]


@contextlib.contextmanager
def prometheus(folder: Path, daemon_port: int, alertmanager_url: str = "") -> Iterator[Prometheus]:
    """A real Prometheus on the committed configuration and rules, with ports changed and durations scaled down."""
    source = ROOT / "grafana" / "prometheus"
    manager = alertmanager_url.removeprefix("http://") or "127.0.0.1:9"
    replace = {"127.0.0.1:8790": f"127.0.0.1:{daemon_port}", "127.0.0.1:9093": manager}
    for path in (source / "prometheus.yml", *(source / "rules").glob("*.yml")):
        copy_scaled(path, folder / path.relative_to(source), replace)
    port = free_port()
    command = [
        program("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    with _service(command, f"http://127.0.0.1:{port}", "Prometheus"):
        yield Prometheus(f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def alertmanager(folder: Path, daemon_port: int, token: Path) -> Iterator[Alertmanager]:
    """A real Alertmanager on the committed configuration, with ports changed and durations scaled down."""
    source = ROOT / "grafana" / "prometheus" / "alertmanager.yml"
    copy_scaled(source, folder / source.name, {"127.0.0.1:8790": f"127.0.0.1:{daemon_port}"})
    shutil.copy(token, folder / "alert.token")
    port = free_port()
    command = [
        program("alertmanager", "prometheus-alertmanager"), f"--config.file={folder / source.name}",
        f"--storage.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=", "--log.level=error",
    ]  # fmt: skip
    with _service(command, f"http://127.0.0.1:{port}", "Alertmanager"):
        yield Alertmanager(f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def _service(command: list[str], url: str, name: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_without_proxy())
    try:
        until(lambda: _ok(f"{url}/-/ready"), name)
        yield
    finally:
        process.terminate()
        process.wait(20)


def _without_proxy() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def _ok(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
