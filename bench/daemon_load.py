"""Claim: one daemon serves 512 ranks that report every second, and a change of knobs reaches each rank within a second.

Simulated agents behave like real ones: each registers once, posts a report every second (one step and rates, no
timeline), and waits in a long poll for its directive. Meanwhile an operator changes a knob every few seconds, and every
agent votes yes. The measured time of a change is from the first byte of the PATCH until an agent has received the
committed knobs.

The daemon is a process on one core, the agents run on another core; on a machine with one core both share it (`cores`).
`report_p99_seconds`, `patch_p99_seconds`: 99 % of the reports and of the changes take at most this time. `rss_slope`:
growth of the daemon's resident memory from the end of the warm-up (a quarter of the time) to the end, as a share of its
size. `load`: other load of the machine. `daemon_cpu_share`, `generator_cpu_share`: CPU use of the daemon, and of the
process of the agents.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tidegate.knobs.knobs import Knobs
from tidegate.wire.agent import AgentHello, AgentReport, Rates
from tidegate.wire.step import StallRow, StepReport

RUN = "load"
PATCH_SECONDS = 5.0
POLL_SECONDS = 20.0
START_SECONDS = 30.0
STEP = StepReport(
    step=0,
    timestamp=0.0,
    phase_seconds={"forward": 0.2, "backward": 0.4, "update": 0.3, "other": 0.0},
    exposed_seconds={"update": 0.3},
    stalls=tuple(StallRow(phase="update", cause=cause, seconds=0.01) for cause in ("h2d", "d2h", "cpu")),
    device_memory_peak_bytes={"forward": 10**10, "backward": 10**10, "update": 10**10},
    loss=1.0,
).model_dump(mode="json")
REPORT = AgentReport(
    timestamp=0.0,
    step=0,
    phase="forward",
    generation=0,
    effective={"stride": 2.0, "static_ratio": 0.0},
    rates=Rates(h2d_bytes_per_second=1e10, d2h_bytes_per_second=1e10, cpu_params_per_second=1e9),
).model_dump(mode="json")


@dataclass
class Figures:
    report_seconds: list[float] = field(default_factory=list)
    patch_seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    changed_at: dict[int, float] = field(default_factory=dict)
    """Time at which the PATCH that made a generation was sent, by number of the generation."""
    received: list[tuple[int, float]] = field(default_factory=list)


class Connection:
    """An HTTP connection that is kept open. It is simpler than a client library, whose CPU time for a thousand
    connections would be too much for one core."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._at = (host, port)
        self._head = f"Host: {host}\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: str = "") -> bytes:
        """Sends a request, and returns the body of the answer. OSError with the status and text of an answer other than
        2xx."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._at)
        reader, writer = self._streams
        content = body.encode()
        length = f"Content-Length: {len(content)}\r\n\r\n"
        writer.write(f"{method} /v1/agents{path} HTTP/1.1\r\n{self._head}{length}".encode() + content)
        head = await reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head)
        answer = await reader.readexactly(int(found[1])) if found else b""
        if head[9:10] != b"2":
            raise OSError(f"the daemon answered {head[9:12].decode()}: {answer[:200].decode()}")
        return answer


class SimulatedAgent:
    """One simulated rank: two tasks with a connection each, like the two threads of a real agent."""

    def __init__(self, connect: Callable[[], Connection], rank: int, world_size: int, figures: Figures) -> None:
        self._reporter, self._listener = connect(), connect()
        self._figures = figures
        self.id = uuid.uuid4().hex
        self._rank, self._world_size = rank, world_size
        self._step = 0
        self._generation = 0
        self._voted: int | None = None
        self._applied: dict[str, int] | None = None

    async def hello(self) -> None:
        await self._reporter.ask("POST", "", self.message().model_dump_json())

    def message(self) -> AgentHello:
        return AgentHello(
            agent=self.id,
            run=RUN,
            rank=self._rank,
            world_size=self._world_size,
            host=f"node-{self._rank // 8}",
            pid=4711,
            device_kind="emulated",
            metrics_address=f"node-{self._rank // 8}:{9400 + self._rank % 8}",
            knobs={"stride": 2.0, "static_ratio": 0.0},
            started_at=time.time(),
        )

    async def report_forever(self) -> None:
        await asyncio.sleep(random.random())  # ranks do not report in one moment
        due = time.perf_counter()
        while True:
            began = time.perf_counter()
            try:
                answer = await self._reporter.ask("POST", f"/{self.id}/reports", self.report())
                self._figures.report_seconds.append(time.perf_counter() - began)
                self._take(json.loads(answer)["directive"])
            except OSError as error:
                self._figures.failures.append(f"report: {error!r}")
            due += 1.0
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def listen_forever(self) -> None:
        while True:
            query = f"committed={self._generation}&wait={POLL_SECONDS}"
            query += f"&proposed={self._voted}" if self._voted is not None else ""
            try:
                directive = json.loads(await self._listener.ask("GET", f"/{self.id}/directive?{query}"))
                if directive["proposed"] is not None and directive["proposed"] != self._voted:
                    self._voted = directive["proposed"]
                    vote = json.dumps({"generation": self._voted, "can": True})
                    path = f"/{self.id}/votes?wait={POLL_SECONDS}"
                    directive = json.loads(await self._listener.ask("POST", path, vote))
                self._take(directive)
            except OSError as error:
                self._figures.failures.append(f"listen: {error!r}")
                await asyncio.sleep(1.0)

    def _take(self, directive: dict[str, Any]) -> None:
        """Takes the committed knobs of a directive. As in a real agent, they are applied at the end of the step and
        reported with it."""
        if directive["committed"] > self._generation:
            self._generation = directive["committed"]
            self._figures.received.append((self._generation, time.perf_counter()))
            self._applied = {"generation": self._generation, "step": self._step + 1}

    def report(self) -> str:
        self._step += 1
        said = {**REPORT, "timestamp": time.time(), "step": self._step, "generation": self._generation}
        said["applied"], self._applied = self._applied, None
        return json.dumps({**said, "steps": [{**STEP, "timestamp": time.time(), "step": self._step}]})


async def operate(url: str, token: str, figures: Figures, end: float) -> None:
    """Changes a knob every few seconds until `end`, and waits for the outcome of each change."""
    headers = {"Authorization": f"Bearer {token}", "If-Match": "*"}
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=30.0) as http:
        stride = 2
        while time.perf_counter() < end - PATCH_SECONDS:
            stride = 2 + (stride - 1) % 7
            began = time.perf_counter()
            answer = await http.patch(
                f"/v1/runs/{RUN}/knobs", json={"changes": {"stride": stride}}, params={"wait": PATCH_SECONDS}
            )
            body = answer.json()
            if answer.status_code == 200 and body["state"] in ("committed", "applied"):
                figures.changed_at[body["generation"]] = began
            else:
                figures.failures.append(f"patch: {answer.status_code} {body.get('state')} {body.get('outcome')}")
            await asyncio.sleep(max(0.0, began + PATCH_SECONDS - time.perf_counter()))


async def load(url: str, tokens: dict[str, str], num_agents: int, seconds: float, pid: int) -> dict[str, Any]:
    figures, resident = Figures(), list[tuple[float, int]]()
    address = urlsplit(url)
    connect = functools.partial(Connection, address.hostname or "", address.port or 0, tokens["agent"])
    agents = [SimulatedAgent(connect, rank, num_agents, figures) for rank in range(num_agents)]
    for agent in agents:
        await agent.hello()
    loops = [loop for agent in agents for loop in (agent.report_forever(), agent.listen_forever())]
    tasks = [asyncio.create_task(loop) for loop in loops]
    await asyncio.sleep(3.0)
    figures.report_seconds.clear()
    began, cpu, own_cpu = time.perf_counter(), cpu_seconds(pid), time.process_time()
    operator = asyncio.create_task(operate(url, tokens["operate"], figures, began + seconds))
    while time.perf_counter() - began < seconds:
        resident.append((time.perf_counter() - began, resident_bytes(pid)))
        await asyncio.sleep(seconds / 60)
    await operator
    took = time.perf_counter() - began
    cpu, own_cpu = cpu_seconds(pid) - cpu, time.process_time() - own_cpu
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    reached = [at - figures.changed_at[number] for number, at in figures.received if number in figures.changed_at]
    warm = [size for at, size in resident if at >= seconds / 4]
    return {
        "reports": len(figures.report_seconds),
        "reports_per_second": len(figures.report_seconds) / seconds,
        "report_p50_seconds": statistics.median(figures.report_seconds),
        "report_p99_seconds": percentile(figures.report_seconds, 99),
        "changes": len(figures.changed_at),
        "changes_received": len(reached) / max(1, num_agents * len(figures.changed_at)),
        "patch_p50_seconds": statistics.median(reached) if reached else None,
        "patch_p99_seconds": percentile(reached, 99) if reached else None,
        "daemon_cpu_share": cpu / took,
        "generator_cpu_share": own_cpu / took,
        "rss_bytes": resident[-1][1],
        "rss_slope": slope(warm),
        "failures": len(figures.failures),
        "first_failure": figures.failures[0][:200] if figures.failures else None,
    }


def memory_alone(num_agents: int, seconds: float) -> dict[str, Any]:
    """Measures memory growth and CPU time of the control plane without HTTP. It runs in this process, and gets the
    reports of `num_agents` ranks as fast as it can handle them.

    This is for machines with too much other load to measure waiting times. seconds: simulated duration; the simulated
    clock advances by one second when every rank has reported.
    """
    from tidegate.daemon.control.control_plane import ControlPlane
    from tidegate.daemon.control.run import Clocks
    from tidegate.daemon.storage.store import Store

    now, resident = 0.0, list[int]()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"sqlite:///{folder}/tidegate.db")
        plane = ControlPlane(store, clock=Clocks(mono=lambda: now))
        agents = [
            SimulatedAgent(lambda: Connection("", 0, ""), rank, num_agents, Figures()) for rank in range(num_agents)
        ]
        for agent in agents:
            plane.hello(agent.message(), Knobs(stride=2.0))
        began = time.process_time()
        for _ in range(round(seconds)):
            for agent in agents:
                plane.report(agent.id, AgentReport.model_validate_json(agent.report()))
            now += 1.0
            plane.tick()
            plane.step_writer.wait_for_write()
            resident.append(resident_bytes(os.getpid()))
        took = time.process_time() - began
        plane.save_all()
        store.close()
    warm = resident[len(resident) // 4 :]
    return {
        "in_process": True,
        "reports": num_agents * len(resident),
        "cpu_seconds_per_report": took / num_agents / len(resident),
        "rss_bytes": resident[-1],
        "rss_slope": slope(warm),
    }


def percentile(values: list[float], rank: int) -> float:
    return statistics.quantiles(values, n=100)[rank - 1] if len(values) > 1 else values[0]


def slope(sizes: list[int]) -> float:
    """Relative growth of a line fitted to `sizes`: from its start to its end, as a share of its value at the start."""
    line = statistics.linear_regression(range(len(sizes)), sizes)
    return line.slope * (len(sizes) - 1) / line.intercept


def cpu_seconds(pid: int) -> float:
    """CPU time of the process in seconds, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--quick", action="store_true", help="32 agents for 10 s: whether it works, no claim")
    parser.add_argument("--in-process", action="store_true", help="memory and processor time alone, without HTTP")
    parser.add_argument("--agents", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args()
    num_agents, seconds = (32, 10.0) if options.quick else (options.agents, options.seconds)
    cores, before = sorted(os.sched_getaffinity(0)), os.getloadavg()[0]
    found = memory_alone(num_agents, seconds) if options.in_process else served(num_agents, seconds, cores)
    machine = {"cores": len({cores[0], cores[-1]}), "cpu": processor(), "load": before}
    machine["python"] = platform.python_version()
    found = {"bench": "daemon_load", "agents": num_agents, "seconds": seconds, **found, **machine}
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:>22}  {value:.4g}" if isinstance(value, float) else f"{name:>22}  {value}")


def served(num_agents: int, seconds: float, cores: list[int]) -> dict[str, Any]:
    """Starts a daemon in its own process, lets `num_agents` simulated agents use it for `seconds`, and returns the
    measured figures. cores: CPU cores; the daemon runs on the first one, the agents on the last one."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        command = [sys.executable, "-m", "tidegate", "daemon", "--port", "0", "--state-dir", folder]
        daemon = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, {cores[0]})
        )
        try:
            os.sched_setaffinity(0, {cores[-1]})
            url = announced(state, daemon)
            tokens = {scope: (state / f"{scope}.token").read_text().strip() for scope in ("agent", "operate")}
            return asyncio.run(load(url, tokens, num_agents, seconds, daemon.pid))
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(20)


def processor() -> str:
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def announced(state: Path, daemon: subprocess.Popen[bytes]) -> str:
    """Waits until the daemon answers, and returns its address."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and daemon.poll() is None:
        if (state / "daemon.json").exists():
            url = str(json.loads((state / "daemon.json").read_text())["url"])
            try:
                if httpx.get(f"{url}/readyz", trust_env=False, timeout=2.0).status_code == 200:
                    return url
            except httpx.HTTPError:
                pass
        time.sleep(0.05)
    sys.exit("the daemon did not start")


if __name__ == "__main__":
    main()
