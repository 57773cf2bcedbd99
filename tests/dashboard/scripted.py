"""The real daemon in a thread, and an agent whose steps are made up: figures of a plausible offloaded training."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.services import meanwhile, until
from tidegate.client.daemon_client import DaemonClient
from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.server.app import create_app
from tidegate.daemon.server.main import make_server
from tidegate.errors import DaemonError
from tidegate.wire.agent import AgentHello, AgentReport, Applied, Directive, Rates, Vote
from tidegate.wire.base import DeviceKind
from tidegate.wire.evidence import SubgroupSizes
from tidegate.wire.step import LinkRow, PathRow, PathState, StallRow, StepReport
from tidegate.wire.timeline import PhaseRow, SpanRow, TimelineView

MB = 1_000_000
SUBGROUPS = 16
NUMEL = 100 * MB
FORWARD, BACKWARD = 0.61, 1.34
RATES = Rates(
    h2d_bytes_per_second=21.4e9,
    d2h_bytes_per_second=20.1e9,
    cpu_params_per_second=1.05e9,
    device_params_per_second=9.1e9,
    norm_params_per_second=40e9,
)


@dataclass
class Daemon:
    """A running daemon and the tokens that it wrote."""

    url: str
    state: Path
    stop: Callable[[], None]
    clients: list[DaemonClient] = field(default_factory=list)

    def token(self, scope: str) -> str:
        return (self.state / f"{scope}.token").read_text().strip()

    def operator(self) -> DaemonClient:
        return DaemonClient(self.url, self.token("operate"))


@contextlib.contextmanager
def start_daemon(state: Path, port: int = 0, lease_seconds: float = 10.0) -> Iterator[Daemon]:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    settings = Settings(state_dir=state, port=port, lease_seconds=lease_seconds, proposal_seconds=60.0)
    server = make_server(create_app(settings), settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join(15)
        listener.close()

    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    daemon = Daemon(url, state, stop)
    try:
        with DaemonClient(url) as client:
            until(client.health, "a ready daemon")
        yield daemon
    finally:
        for client in daemon.clients:
            client.close()
        stop()


@dataclass
class Agent:
    """One rank that says what it is told to say. `refuse` is its answer to every proposal, when set.

    `predicted` is what it expects of its next update, in seconds.
    """

    daemon: Daemon
    run: str = "llama-7b"
    rank: int = 0
    world_size: int = 1
    device_kind: DeviceKind = "cuda"
    refuse: str = ""
    predicted: float | None = 1.4
    paths: tuple[str, ...] = ()
    device_memory_bytes: int | None = None
    step: int = 0
    knobs: dict[str, float | str] = field(default_factory=lambda: {"stride": "auto", "static_ratio": 0.0})
    generation: int = 0
    process: str = ""
    """Which one it is of those that hold the rank in turn."""

    def __post_init__(self) -> None:
        self.client = DaemonClient(self.daemon.url, self.daemon.token("agent"))
        self.daemon.clients.append(self.client)
        self.id = f"agent-{self.run}-{self.rank}{self.process}"
        self.client.hello(
            AgentHello(
                agent=self.id,
                run=self.run,
                rank=self.rank,
                world_size=self.world_size,
                host="gpu-1",
                pid=4711 + self.rank,
                device_kind=self.device_kind,
                metrics_address=f"127.0.0.1:{9400 + self.rank}",
                knobs=self.knobs,
                subgroups=(SubgroupSizes(numel=NUMEL, count=SUBGROUPS, weight_bytes=2, grad_bytes=2, state_bytes=10),),
                paths=self.paths,
                device_memory_bytes=self.device_memory_bytes,
                started_at=time.time() - 3600,
            )
        )

    def train(self, num_steps: int = 1, *, ago: float = 0.0) -> None:
        """Reports steps as if they had just ended, the last one `ago` seconds before now."""
        made, now = [], time.time() - ago
        begun = {"applied": Applied(generation=self.generation, step=1)} if self.step == 0 else {}
        for left in range(num_steps - 1, -1, -1):
            self.step += 1
            made.append(step_report(self.step, now - left * 3.5, self.paths))
        self.report(steps=tuple(made), timeline=timeline(self.step), **begun)

    def report(self, **more: object) -> None:
        lease = self.client.report(
            self.id,
            AgentReport(
                timestamp=time.time(),
                step=self.step,
                phase="backward",
                generation=self.generation,
                effective={**self.knobs, "stride": 3.0 if self.knobs["stride"] == "auto" else self.knobs["stride"]},
                rates=RATES,
                predicted_update_seconds=self.predicted,
                **more,  # type: ignore[arg-type]
            ),
        )
        self.obey(lease.directive)

    def obey(self, directive: Directive) -> None:
        if directive.proposed is not None:
            self.client.vote(self.id, Vote(generation=directive.proposed, can=not self.refuse, reason=self.refuse))
        if directive.committed > self.generation:
            self.generation, self.knobs = directive.committed, dict(directive.committed_knobs)
            self.report(applied=Applied(generation=self.generation, step=self.step + 1))

    @contextlib.contextmanager
    def training(self, seconds_a_step: float = 0.4) -> Iterator[None]:
        """Reports a step every now and then, and answers proposals, in a thread."""

        def loop(end: threading.Event) -> None:
            while not end.is_set():
                with contextlib.suppress(DaemonError):  # the daemon may be away: training goes on
                    self.train()
                    wanted = self.client.directive(self.id, self.generation, None, wait=seconds_a_step)
                    self.obey(wanted)
                end.wait(seconds_a_step)

        with meanwhile(loop):
            yield

    def finish(self) -> None:
        self.client.goodbye(self.id)


def path_state(path: str, step: int) -> PathState:
    return PathState(
        path=path,
        free_bytes=900_000 * MB,
        bytes={"read": step * 4_000 * MB, "write": step * 4_000 * MB},
        lock_wait_seconds={"read": 0.25, "write": 1.0},
        errors={"read": 0, "write": 2},
        ceiling_bytes_per_second={"read": 8e9, "write": 5e9},
        written_bytes_per_day=98.7e12,
    )


def step_report(step: int, timestamp: float, paths: tuple[str, ...] = ()) -> StepReport:
    """Each path holds two subgroups, and reads at half of its ceiling."""
    wobble = 1 + 0.04 * ((step * 7919) % 11 - 5) / 5
    update = 1.46 * wobble
    return StepReport(
        step=step,
        timestamp=timestamp,
        phase_seconds={"forward": FORWARD, "backward": BACKWARD * wobble, "update": update, "other": 0.04},
        exposed_seconds={"backward": 0.06, "update": update},
        stalls=(
            StallRow(phase="update", cause="h2d", seconds=0.31 * update),
            StallRow(phase="update", cause="d2h", seconds=0.06 * update),
            StallRow(phase="backward", cause="d2h", seconds=0.05),
        ),
        links=(
            LinkRow(direction="d2h", phase="backward", content="gradient", bytes=3_200 * MB, busy_seconds=0.16),
            LinkRow(direction="h2d", phase="update", content="state", bytes=5_000 * MB, busy_seconds=0.24),
            LinkRow(direction="d2h", phase="update", content="state", bytes=5_000 * MB, busy_seconds=0.25),
            LinkRow(direction="h2d", phase="update", content="weight", bytes=2_200 * MB, busy_seconds=0.11),
        ),
        device_memory_peak_bytes={"forward": 31_200 * MB, "backward": 38_700 * MB, "update": 14_100 * MB},
        host_memory_bytes={"state": 16_000 * MB, "mirror": 2_200 * MB, "gradient": 3_200 * MB},
        cpu_seconds={"forward": 0.7, "backward": 1.6, "update": 14.8},
        update_params={"cpu": 11 * NUMEL, "device": 5 * NUMEL},
        subgroups={"host": 14 - 2 * len(paths), "device": 2, **dict.fromkeys(paths, 2)},
        paths=tuple(
            PathRow(path=path, operation=operation, phase=phase, bytes=2_000 * MB, busy_seconds=0.5)
            for path in paths
            for operation in ("read", "write")
            for phase in ("backward", "update")
        ),
        path_states=tuple(path_state(path, step) for path in paths),
        loss=2.1 + 3.2 / (1 + step / 30) + 0.05 * wobble,
        tokens=16_384,
        grad_norm=0.8 + 0.3 * wobble,
        skipped=step % 97 == 0,
    )


def timeline(step: int) -> TimelineView:
    """Two staging slots, every second subgroup on the device, which waits for h2d most of the time."""
    begin = FORWARD + BACKWARD
    spans: list[SpanRow] = []
    deps: dict[int, tuple[int, ...]] = {}

    def add(
        kind: str, lane: str, subgroup: int, start: float, seconds: float, nbytes: int = 0, after: tuple[int, ...] = ()
    ) -> SpanRow:
        start = max([start, *(spans[op].end for op in after), *(s.end for s in spans if s.lane == lane)])
        slot = subgroup // 2 % 2 if kind in ("state_h2d", "device_update", "state_d2h") else None
        deps[len(spans)] = after
        spans.append(
            SpanRow(
                op=len(spans),
                kind=kind,
                lane=lane,
                subgroup=subgroup,
                start=start,
                end=start + seconds,
                nbytes=nbytes,
                numel=0 if nbytes else NUMEL,
                slot=slot,
            )
        )
        return spans[-1]

    arrived = [add("grad_d2h", "d2h", n, FORWARD + 0.1 + n * 0.075, 0.011, 200 * MB).op for n in range(SUBGROUPS)]
    ready = add("norm", "device", -1, begin, 0.04, after=(arrived[-1],)).op
    freed: list[tuple[int, ...]] = [(), ()]
    for subgroup in range(SUBGROUPS):
        if subgroup % 2:
            slot = subgroup // 2 % 2
            here = add("state_h2d", "h2d", subgroup, begin, 0.098, 1000 * MB, after=freed[slot]).op
            done = add("device_update", "device", subgroup, begin, 0.031, after=(here, ready)).op
            freed[slot] = (add("state_d2h", "d2h", subgroup, begin, 0.095, 1000 * MB, after=(done,)).op,)
        else:
            done = add("cpu_update", "cpu", subgroup, begin, 0.092, after=(ready, arrived[subgroup])).op
            add("weight_h2d", "h2d", subgroup, begin, 0.011, 200 * MB, after=(done,))
    end = max(span.end for span in spans)
    phases = (
        PhaseRow(phase="forward", start=0.0, end=FORWARD),
        PhaseRow(phase="backward", start=FORWARD, end=begin),
        PhaseRow(phase="update", start=begin, end=end),
    )
    return TimelineView(
        step=step,
        source="measured",
        origin=time.time() - end,
        phases=phases,
        spans=tuple(spans),
        num_spans=len(spans),
        deps=deps,
    )
