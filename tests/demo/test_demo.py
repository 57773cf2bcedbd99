"""`tidegate demo` as a new user runs it: real model, real text, daemon, metrics, live view, command line."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.dashboard.browser import screenshot
from tests.services import ROOT, free_port, until
from tidegate.demo import DemoOptions
from tidegate.demo.services import Service
from tidegate.demo.session import Session

DOCS_PICTURE = ROOT / "docs" / "images" / "live-view.png"
KEEP = "TIDEGATE_KEEP_SCREENSHOTS"
"""Set it to replace the picture in docs/ by the one that the test takes."""

KEYS = {
    "steps", "tokens", "loss_first", "loss_last", "device", "phase_seconds", "stall_seconds", "exposed_seconds",
    "generations", "agent_overhead_ratio", "update_params", "link_bytes", "subgroups", "paths",
}  # fmt: skip


@dataclass
class Demo:
    """A demo in a process of its own; `said` is what it has printed so far."""

    folder: Path
    arguments: list[str]
    said: str = ""
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", "tidegate", *self.arguments]
        self.process = subprocess.Popen(
            command, cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def env(self) -> dict[str, str]:
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        return {**os.environ, "TIDEGATE_STATE_DIR": str(self.folder / "state"), "PYTHONPATH": path}

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.said += line

    def wait(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def address(self, what: str) -> str:
        found = until(lambda: re.search(rf"{what}\s+(http://\S+)", self.said), f"address of {what}", 60)
        return found.group(1)

    def tidegate(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tidegate", *arguments], cwd=self.folder, env=self.env, capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def ports() -> list[str]:
    return ["--port", str(free_port()), "--dashboard-port", str(free_port())]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Demo]]:
    demos: list[Demo] = []
    yield demos
    for demo in demos:
        if demo.process.poll() is None:
            demo.process.kill()
            demo.process.wait()


@pytest.mark.timeout(300)
def test_a_short_demo_trains_beside_its_services_and_ends_with_a_summary(
    tmp_path: Path, ports: list[str], started: list[Demo]
) -> None:
    demo = Demo(tmp_path, ["demo", "--steps", "12", "--run", "short", *ports])
    started.append(demo)
    until(lambda: "step 1/12" in demo.said, "step 1", 60)
    children = demo.children()
    assert "tidegate_phase_seconds_count" in httpx.get(demo.address("metrics"), trust_env=False).text
    assert httpx.get(f"{demo.address('live view').rstrip('/')}/_stcore/health", trust_env=False).text == "ok"
    opened = httpx.get(demo.address("open by"), trust_env=False)
    assert (opened.status_code, opened.headers["location"]) == (303, "/")
    assert "code=" not in (tmp_path / "runs" / "short" / "live-view.log").read_text()
    assert demo.wait(200) == 0, demo.said
    assert not any(map(lives, children))
    summary = json.loads((tmp_path / "runs" / "short" / "summary.json").read_text())
    assert set(summary) >= KEYS
    assert (summary["steps"], summary["device"]) == (12, "emulated")
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["update_params"] == summary["planned_update_params"]
    assert summary["link_bytes"]["h2d"] == summary["planned_link_bytes"]["h2d"]
    assert (tmp_path / "runs" / "short" / "trace.json").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_terminal_shows_no_loss_before_there_is_one(tmp_path: Path, ports: list[str]) -> None:
    reading, writing = pty.openpty()
    command = [sys.executable, "-m", "tidegate", "demo", "--headless", "--steps", "2", *ports]
    env = {**os.environ, "TIDEGATE_STATE_DIR": str(tmp_path / "state"), "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdin=writing, stdout=writing, stderr=writing)
    os.close(writing)
    said = b""
    try:
        with suppress(OSError):  # the other end is gone
            while piece := os.read(reading, 4096):
                said += piece
        assert process.wait(60) == 0, said.decode()
    finally:
        process.kill()
        process.wait()
        os.close(reading)
    assert b"0/2" in said
    assert re.search(rb"loss \d", said)
    assert b"loss nan" not in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_trains_shows_itself_and_takes_knobs(tmp_path: Path, ports: list[str], started: list[Demo]) -> None:
    demo = Demo(tmp_path, ["demo", "--steps", "120", "--run", "first", *ports])
    started.append(demo)
    view, metrics = demo.address("live view"), demo.address("metrics")
    assert "swagger-ui" in httpx.get(demo.address("REST docs"), trust_env=False).text
    until(lambda: "step 36/120" in demo.said, "step 36", 60)
    children = demo.children()
    assert len(children) >= 2

    assert "first" in demo.tidegate("status")
    changed = demo.tidegate("knobs", "set", "stride=3", "static_ratio=0.25", "tier_split=nvme:2,pfs:1")
    assert "generation 1" in changed.lower()
    assert "0.25" in demo.tidegate("knobs", "get")
    until(lambda: "tidegate_generation 1.0" in httpx.get(metrics, trust_env=False).text, "generation 1 in /metrics")
    picture = DOCS_PICTURE if KEEP in os.environ else tmp_path / "live-view.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    read_token = (demo.folder / "state" / "read.token").read_text().strip()
    screenshot(view.rstrip("/") + "/run", picture, token=read_token)
    assert picture.stat().st_size > 30_000

    assert demo.wait(450) == 0, demo.said
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    check_summary(tmp_path / "runs" / "first")
    assert "loss" in demo.said
    assert "backward" in demo.said
    assert re.search(r"storage\s+nvme: \S+/nvme\n\s+storage\s+pfs: ", demo.said)
    assert re.search(r"state of \d+ subgroups lives: \d+ in host memory, \d+ in device memory, \d+ on nvme", demo.said)
    assert re.search(r"nvme: [\d,]+ MB read, [\d,]+ MB written", demo.said)


def check_summary(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) >= KEYS
    assert summary["steps"] == 120
    assert summary["device"] == "emulated"
    assert summary["loss_last"] < 0.6 * summary["loss_first"]
    assert summary["update_params"] == summary["planned_update_params"]
    assert min(summary["update_params"].values()) > 0
    assert summary["link_bytes"]["h2d"] == summary["planned_link_bytes"]["h2d"]
    assert [row["generation"] for row in summary["generations"]] == [0, 1]
    assert summary["knobs"] == {
        "stride": 3,
        "static_ratio": 0.25,
        "tier_split": "nvme:2,pfs:1",
        "host_cache": 12_000_000,
        "order": "auto",
    }
    assert set(summary["subgroups"]) == {"device", "host", "nvme", "pfs"}
    assert min(summary["subgroups"].values()) > 0
    assert summary["subgroups"]["nvme"] > summary["subgroups"]["pfs"]
    for path in ("nvme", "pfs"):
        moved = summary["paths"][path]["bytes"]
        assert moved["write"] >= moved["read"] > 1_000_000
    assert not (folder / "storage").exists(), "state goes with the run"
    assert set(summary["phase_seconds"]) == {"forward", "backward", "update", "other"}
    trace = json.loads((folder / "trace.json").read_text())
    kinds = {event.get("cat") for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"phase", "cpu_update", "device_update", "state_h2d", "grad_d2h", "fetch", "flush"} <= kinds


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_service_that_starts_as_ctrl_c_comes_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            begun.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            Service("Sleep", ["sleep", "60"], tmp_path / "log")
        assert begun[0].poll() == -signal.SIGTERM
    finally:
        begun[0].kill()


class Collected:
    """Ctrl-C comes while Python cleans up, where nothing can be raised."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_ctrl_c_that_python_drops_while_cleaning_up_ends_the_demo_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr("tidegate.demo.session.start_daemon", lambda *_: (Collected(), ("http://nowhere", None))[1])
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    try:
        assert Session(DemoOptions(view=False, run="dropped")).run() == 130
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    out, error = capfd.readouterr()
    assert "Interrupted: stopping" in out
    assert "Traceback" not in error
    assert sys.unraisablehook is sys.__unraisablehook__


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "moment",
    ["run ", pytest.param("live view", marks=pytest.mark.slow), pytest.param("step 1/", marks=pytest.mark.slow)],
)
def test_ctrl_c_at_any_moment_leaves_nothing_behind(
    tmp_path: Path, ports: list[str], started: list[Demo], moment: str
) -> None:
    demo = Demo(tmp_path, ["demo", "--steps", "5000", "--run", "cut", *ports])
    started.append(demo)
    until(lambda: moment in demo.said, moment, 60)
    children = demo.children()
    demo.process.send_signal(signal.SIGINT)
    # Python ends by the signal itself where it had to leave an exec() of some import; for a shell both are 130.
    assert demo.wait(30) in (130, -signal.SIGINT), demo.said
    assert "Traceback" not in demo.said
    # One that was being started when the signal came is ended by the kernel, when its parent is gone. It may not have
    # been among `children` yet: the daemon removes its file when it ends.
    until(lambda: not any(map(lives, children)), "the end of all children", 10)
    until(lambda: not (tmp_path / "state" / "daemon.json").exists(), "the end of the daemon", 30)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not {name for name in left if name.endswith((".lock", ".tmp", ".pid"))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--text", "nowhere"], "is not a folder"),
        (["--text", "empty"], "0 bytes of readable text"),
        (["--static-ratio", "2"], "static_ratio=2.0 is out of range"),
        (["--stride", "0.2"], "stride='0.2' is out of range"),
        (["--path", "/nvme"], "is not NAME=DIR"),
        (["--path", "host=/nvme"], "A path cannot be called 'host'"),
        (["--path", "nvme=empty", "--tier-split", "ssd:1"], "names 'ssd'"),
        (["--path", "nvme=nowhere"], "nowhere does not exist: create it first"),
    ],
)
def test_an_error_is_one_sentence_and_a_non_zero_exit(
    tmp_path: Path, ports: list[str], started: list[Demo], arguments: list[str], says: str
) -> None:
    (tmp_path / "empty").mkdir()
    demo = Demo(tmp_path, ["demo", *arguments, *ports])
    started.append(demo)
    assert demo.wait(120) in (1, 2), demo.said
    assert says in " ".join(demo.said.split()), demo.said
    assert "Traceback" not in demo.said


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_taken_port_is_said_before_training(tmp_path: Path, ports: list[str], started: list[Demo]) -> None:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        taken = str(other.server_address[1])
        for arguments in (["--port", taken, *ports[2:]], [*ports[:2], "--dashboard-port", taken]):
            demo = Demo(tmp_path, ["demo", *arguments])
            started.append(demo)
            assert demo.wait(60) in (1, 2), demo.said
            assert taken in demo.said
            assert "Traceback" not in demo.said
        other.shutdown()
