"""Claim: the live view can stay open: no leak in browser or server, and a refresh takes under half a second.

A real daemon gets a step and a timeline each second from each of 8 ranks of a run. The live view's server is a process,
started as users start it. A headless Chromium has two of its pages open, which refresh themselves every 1.5 s: Run
(which has the most charts) and Tune. Before the measurement starts, the ranks report as many steps as the daemon
stores, so that the charts do not grow afterwards.

`refresh_p95_seconds`: time from the request of a part of a page to the last message of the answer, by the browser's
clock, including waits for other parts, without painting. `…_slope`: growth of a fitted line from the end of the warm-up
(a quarter of the time) to the end, as a share of its start, for the server's resident memory, the proportional set size
of all browser processes, and the JavaScript heap after garbage collections. `…_megabytes`: all samples, including the
warm-up. `minutes`: duration. `load`: load of the machine at the start. `cores_busy`: cores in use by each program.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import CDPSession, Page, sync_playwright
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the browser and the scripted ranks are the tests'

from tests.dashboard.browser import ARGUMENTS, CHROMIUM, serve, settle, sign_in  # noqa: E402
from tests.dashboard.scripted import Agent, Daemon  # noqa: E402
from tests.services import daemon_process, meanwhile, until  # noqa: E402
from tidegate.errors import DaemonError  # noqa: E402

RUN = "soak"
PAGES = ("run", "tune")
WINDOW_STEPS = 256
"""Number of steps that each rank reports before the measurement starts. The daemon stores at most this number of steps
of a rank, so afterwards neither the stored steps nor the charts grow."""
MOST_SAMPLES, SECONDS_A_SAMPLE = 60, 10.0
"""Limits for the samples of memory: their largest number, and the least seconds between two of them. Samples are rare
because each one runs a garbage collection in the pages, which keeps these busy."""
BINARY = 2
WARM_UP = 0.25
MAX_SLOPE = 0.05
MAX_REFRESH_SECONDS = 0.5


@dataclass
class Refreshes:
    """Measures the refreshes of one page from the messages of its websocket.

    Each request to the server names one part of the page to draw again. The server can answer several requests at once,
    if they came while it sent an earlier answer. The last message of an answer names all parts that it was for.
    """

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _asked: dict[str, float] = field(default_factory=dict)

    def watch(self, page: Page, session: CDPSession) -> None:
        """Begins to record the page's messages and errors. Call this before the page is opened."""
        page.on("pageerror", lambda error: self.failures.append(str(error)))
        session.send("Network.enable")
        session.on("Network.webSocketFrameSent", self._sent)
        session.on("Network.webSocketFrameReceived", self._received)

    def _sent(self, frame: dict[str, Any]) -> None:
        if part := BackMsg.FromString(_payload(frame)).rerun_script.fragment_id:
            self._asked.setdefault(part, frame["timestamp"])

    def _received(self, frame: dict[str, Any]) -> None:
        message = ForwardMsg.FromString(_payload(frame))
        if message.WhichOneof("type") == "script_finished":
            now, parts = frame["timestamp"], message.metadata.run.fragment_ids
            self.seconds += [now - self._asked.pop(part) for part in parts if part in self._asked]


def _payload(frame: dict[str, Any]) -> bytes:
    """The content of a binary frame; empty for other frames."""
    response = frame["response"]
    return base64.b64decode(response["payloadData"]) if response["opcode"] == BINARY else b""


@dataclass
class Memory:
    """Samples of memory in bytes: of server, daemon and browser, and of the JavaScript heap of the pages."""

    server: list[int] = field(default_factory=list)
    daemon: list[int] = field(default_factory=list)
    browser: list[int] = field(default_factory=list)
    heap: list[int] = field(default_factory=list)

    def sample(self, server: psutil.Process, daemon: psutil.Process, sessions: list[CDPSession]) -> None:
        self.server.append(server.memory_info().rss)
        self.daemon.append(daemon.memory_info().rss)
        self.browser.append(sum(map(_proportional, _browser_processes())))
        self.heap.append(sum(map(_heap, sessions)))


def soak(minutes: float, num_ranks: int = 8) -> dict[str, Any]:
    """Runs daemon, live view, browser and `num_ranks` simulated ranks for `minutes`, and returns the figures: refresh
    times, growth of memory, and cores in use."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        process = stack.enter_context(daemon_process(Path(folder)))
        os.environ["TIDEGATE_STATE_DIR"] = folder
        daemon = Daemon(process.url, Path(folder), process.kill)
        reported = stack.enter_context(_training(daemon, num_ranks))
        view = stack.enter_context(serve(process.url))
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), headless=True, args=ARGUMENTS)
        stack.callback(browser.close)
        refreshes, sessions, memory = [], [], Memory()
        for path in PAGES:
            page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
            sessions.append(page.context.new_cdp_session(page))
            refreshes.append(Refreshes())
            refreshes[-1].watch(page, sessions[-1])
            _open(page, f"{view}/{path}?run={RUN}")
        server, watched = _child(f"--server.port={view.rpartition(':')[2]}"), _child("--state-dir")
        for one in refreshes:
            one.seconds.clear()
        before, began, busy = len(reported), time.monotonic(), _busy(server, watched)
        samples = max(4, min(MOST_SAMPLES, round(60 * minutes / SECONDS_A_SAMPLE)))
        for sample in range(samples):
            memory.sample(server, watched, sessions)
            left = began + (sample + 1) * 60 * minutes / samples - time.monotonic()
            page.wait_for_timeout(max(1.0, 1000 * left))  # the browser's events are taken in meanwhile
        memory.sample(server, watched, sessions)
        ran = time.monotonic() - began
        cores = {name: (after - busy[name]) / ran for name, after in _busy(server, watched).items()}
    return {
        "minutes": ran / 60,
        "ranks": num_ranks,
        "pages": len(PAGES),
        "reports_per_second": (len(reported) - before) / ran,
        **_refresh_figures([second for one in refreshes for second in one.seconds]),
        **_memory_figures(memory),
        "cores_busy": {name: round(share, 3) for name, share in cores.items()},
        "failures": [failure for one in refreshes for failure in one.failures],
        "load": load,
    }


def meets(found: dict[str, Any]) -> bool:
    """Whether the figures of `soak` fulfil the claim of this bench: memory grows by less than MAX_SLOPE, refreshes take
    less than MAX_REFRESH_SECONDS, and no page had an error."""
    slopes = [found[f"{name}_slope"] for name in ("server", "browser", "heap")]
    return max(slopes) < MAX_SLOPE and found["refresh_p95_seconds"] < MAX_REFRESH_SECONDS and not found["failures"]


def _refresh_figures(seconds: list[float]) -> dict[str, Any]:
    cuts = statistics.quantiles(seconds, n=100)
    return {
        "refreshes": len(seconds),
        "refresh_median_seconds": statistics.median(seconds),
        "refresh_p95_seconds": cuts[94],
        "refresh_p99_seconds": cuts[98],
    }


def _memory_figures(memory: Memory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, sizes in vars(memory).items():
        warm = sizes[round(WARM_UP * len(sizes)) :]
        line = statistics.linear_regression(range(len(warm)), warm)
        found[f"{name}_bytes"] = sizes[-1]
        found[f"{name}_slope"] = line.slope * (len(warm) - 1) / line.intercept
        found[f"{name}_megabytes"] = [round(size / 1e6, 1) for size in sizes]
    return found


@contextlib.contextmanager
def _training(daemon: Daemon, num_ranks: int) -> Iterator[list[float]]:
    """Context in which ranks train and report every second. Yields the list of the times of their reports, which
    grows."""
    times = list[float]()
    agents = [
        Agent(daemon, run=RUN, rank=rank, world_size=num_ranks, paths=("nvme", "pfs")) for rank in range(num_ranks)
    ]
    for agent in agents:
        agent.train(WINDOW_STEPS)

    def loop(agent: Agent, end: threading.Event) -> None:
        while not end.wait(1.0):
            with contextlib.suppress(DaemonError):
                agent.train()
                times.append(time.monotonic())

    try:
        with meanwhile(*(functools.partial(loop, agent) for agent in agents)):
            yield times
    finally:
        for client in daemon.clients:
            client.close()


def _open(page: Page, url: str) -> None:
    def drawn() -> bool:
        try:
            sign_in(page.context, url)
            page.goto(url)
        except Exception:  # the server is starting
            return False
        return True

    until(drawn, "the live view", 60)
    settle(page)


def _child(argument: str) -> psutil.Process:
    """The child process of this process that was started with this argument."""
    return next(child for child in psutil.Process().children() if argument in child.cmdline())


def _browser_processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "chrom" in p.name()]


def _busy(server: psutil.Process, daemon: psutil.Process) -> dict[str, float]:
    """CPU seconds that each program has used since it was started, by name: `server`, `daemon`, `browser`, and `ranks`
    (the simulated ranks, which run in this process)."""
    found = {"server": [server], "daemon": [daemon], "browser": _browser_processes(), "ranks": [psutil.Process()]}
    return {name: sum(map(_cpu_seconds, processes)) for name, processes in found.items()}


def _cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of a process; 0 if it has just ended."""
    try:
        return float(sum(process.cpu_times()[:2]))
    except psutil.Error:
        return 0.0


def _proportional(process: psutil.Process) -> int:
    """Proportional set size of a process in bytes; 0 if it has just ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def _heap(session: CDPSession) -> int:
    for _ in range(2):  # the second takes what the first has let go
        session.send("HeapProfiler.collectGarbage")
    return int(session.send("Runtime.getHeapUsage")["usedSize"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--quick", action="store_true", help="one minute: whether it works, no claim")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--out", type=Path, help="append the line of JSON to this file, too")
    options = parser.parse_args()
    found = soak(1.0 if options.quick else options.minutes, options.ranks)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    found = {"bench": "soak", **found, "meets_claim": meets(found), **machine}
    if options.out is not None:
        with options.out.open("a") as results:
            results.write(json.dumps(found) + "\n")
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:>24}  {value:.4g}" if isinstance(value, float) else f"{name:>24}  {value}")


if __name__ == "__main__":
    main()
