"""Starts the daemon and the live view as child processes, and stops them when the demo ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from tidegate.client.daemon_client import DaemonClient
from tidegate.client.discovery import find_token, state_dir
from tidegate.errors import ConfigError

START_SECONDS = 60.0
PR_SET_PDEATHSIG = 1
INTERRUPTIONS = {signal.SIGINT, signal.SIGTERM}


class Service:
    """A child process in a session of its own: Ctrl-C does not reach it directly, so that the demo can stop its
    services in order."""

    def __init__(self, name: str, command: list[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, log
        # A Ctrl-C while Python forks would be printed and ignored: signals are blocked until the child process is
        # stored.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTIONS)
        try:
            with log.open("wb") as output:
                self.process = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    start_new_session=True, env=dict(env or os.environ), preexec_fn=_prepare_child,
                )  # fmt: skip
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:  # a Ctrl-C while signals were blocked: no caller has this service yet, so stop it here
            self.stop()
            raise

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Waits until `ready()` is true. ConfigError with the last line of the log when the service ends, or is not
        ready within START_SECONDS. The service is stopped if the wait ends with an exception."""
        deadline = time.monotonic() + START_SECONDS
        try:
            while not ready():
                if self.process.poll() is not None:
                    raise ConfigError(f"{self.name} did not start: {_last_line(self.log)}")
                if time.monotonic() > deadline:
                    raise ConfigError(f"{self.name} was not ready within {START_SECONDS:.0f} s; see {self.log}.")
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the process with SIGTERM, and after 20 seconds with SIGKILL."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def start_daemon(port: int, log: Path) -> tuple[str, Service | None]:
    """Starts a daemon at `port`, unless a daemon that accepts this user's token already runs there. Returns its address
    and service; the service is None if the daemon was already running."""
    url = f"http://127.0.0.1:{port}"
    if _is_ours(url):
        return url, None
    command = [sys.executable, "-m", "tidegate", "daemon", "--port", str(port), "--state-dir", str(state_dir())]
    service = Service("The daemon", command, log)
    service.wait_until(lambda: _answers(f"{url}/readyz"))
    return url, service


def start_view(port: int, daemon_url: str, log: Path) -> tuple[str, Service]:
    """Starts the live view at `port`, and returns its address and service. ConfigError if the port cannot be used."""
    from tidegate import dashboard

    problem = dashboard.port_problem(port, "127.0.0.1")
    if problem:
        raise ConfigError(problem)
    url = f"http://127.0.0.1:{port}"
    service = Service("The live view", dashboard.command(port, daemon_url), log, dashboard.environment(daemon_url))
    service.wait_until(lambda: _answers(f"{url}/_stcore/health"))
    return url, service


def _is_ours(url: str) -> bool:
    """Whether a daemon at `url` accepts this user's token."""
    with DaemonClient(url, find_token("operate"), timeout=2.0) as client:
        try:
            client.runs()
        except Exception:
            return False
    return True


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("tidegate: ") if lines else f"it wrote no output (see {log})"


def _prepare_child() -> None:
    """Runs in the child before its program starts. On Linux, the kernel ends the child when the demo is killed and
    cannot clean up."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTIONS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
