"""Two hosts, each with a rank, one daemon: knobs change everywhere between the same two steps, and a host that is cut
off is shown, holds up changes, and comes back."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.namespaces import Host, Switch, switched, why_not
from tests.services import ROOT, until
from tidegate.client.daemon_client import DaemonClient
from tidegate.errors import DaemonError
from tidegate.wire.run import RunView

REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
T = TypeVar("T")
RUN = "two-hosts"
CUT_SECONDS = 20.0


@dataclass
class Job:
    """A torchrun job over both hosts, and the daemon on the first."""

    switch: Switch
    folder: Path
    client: DaemonClient

    def ask(self, question: Callable[[DaemonClient], T]) -> T:
        """Of the daemon, from the first host."""
        return self.switch.hosts[0].do(lambda: question(self.client))

    def run(self) -> RunView | None:
        return next((run for run in self.ask(lambda client: client.runs()) if run.run == RUN), None)

    def liveness(self) -> list[str]:
        run = self.run()
        return [rank.liveness for rank in run.ranks] if run is not None else []

    def steps(self, rank: int) -> list[tuple[int, int, float]]:
        """(step, generation, stride) of every step that the rank has ended."""
        lines = (self.folder / f"steps-{rank}").read_text().splitlines()
        return [(int(step), int(generation), float(stride)) for step, generation, stride in map(str.split, lines)]

    def trains_on(self, seconds: float = 60.0) -> None:
        before = len(self.steps(0))
        until(lambda: len(self.steps(0)) > before + 3, "more steps", seconds)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("hosts")
    state, processes = folder / "state", []
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    with switched("node-a", "node-b") as switch:
        first = switch.hosts[0]
        daemon = [sys.executable, "-m", "tidegate", "daemon", "--bind", first.address, "--state-dir", str(state)]
        try:
            processes.append(first.start(daemon, folder / "daemon.log", cwd=ROOT, env=kept))
            until((state / "daemon.json").exists, "the daemon")
            token = (state / "operate.token").read_text().strip()
            with DaemonClient(f"http://{first.address}:8790", token) as client:
                job = Job(switch, folder, client)
                until(lambda: job.ask(_ready), "a daemon that answers")
                environment = {
                    **kept, "TIDEGATE_STATE_DIR": str(state), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0",
                    "XDG_RUNTIME_DIR": str(folder),
                }  # fmt: skip
                for number, host in enumerate(switch.hosts):
                    command = torchrun(number, host, folder, client.url, first.address)
                    log = folder / f"{host.name}.log"
                    processes.append(host.start(command, log, cwd=ROOT, env=environment))
                until(lambda: job.liveness() == ["live", "live"], "both ranks", 120)
                until(lambda: all((folder / f"steps-{rank}").exists() for rank in (0, 1)), "their first steps")
                job.trains_on()
                yield job
                (folder / "end").touch()
                for process in processes[1:]:
                    assert process.wait(60) == 0, (folder / "node-b.log").read_text()[-3000:]
                assert (folder / "weights-0").read_text() == (folder / "weights-1").read_text()
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _ready(client: DaemonClient) -> bool:
    try:
        return bool(client.health())
    except DaemonError:
        return False


def torchrun(number: int, host: Host, folder: Path, daemon: str, master: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"),
        *(f"--master-addr={master}", "--master-port=29500", "-m", "tests.agent.control.host_ranks"),
        *(str(folder), daemon, host.address),
    ]


def test_a_change_reaches_both_hosts_between_the_same_steps(job: Job) -> None:
    run = job.run()
    assert run is not None
    assert [rank.metrics_address for rank in run.ranks] == ["10.214.0.1:9400", "10.214.0.2:9400"]
    for stride in (3, 4):
        made = job.ask(lambda client, stride=stride: client.set_knobs(RUN, {"stride": stride}))  # type: ignore[misc]
        assert made.outcome == "All 2 ranks said yes."
        until(lambda: job.ask(lambda client: client.generations(RUN))[-1].state == "applied", "applied")
        applied = job.ask(lambda client: client.generations(RUN))[-1].applied
        assert applied[0] == applied[1]
        until(lambda at=applied[0]: min(job.steps(rank)[-1][0] for rank in (0, 1)) > at, "a step with it")
        for rank in (0, 1):
            first = next(step for step, _, running in job.steps(rank) if running == stride)
            assert first == applied[rank]


def test_a_host_that_is_cut_off_is_stale_and_comes_back(job: Job) -> None:
    """As docs/control.md has it: all ranks wait in their collective, nothing is changed, and training goes on after."""
    second = job.switch.hosts[1]
    job.switch.pull(second)
    cut = time.monotonic()
    try:
        until(lambda: job.liveness() == ["live", "stale"], "a stale rank", 15)
        waiting = job.steps(0)[-1][0]
        made = job.ask(lambda client: client.set_knobs(RUN, {"stride": 5}, wait=10))
        assert (made.state, made.outcome) == (
            "aborted",
            "No answer from rank 1 before the deadline: nothing was changed.",
        )
        until(lambda: time.monotonic() > cut + CUT_SECONDS, "the end of the cut")
        assert job.liveness() == ["live", "stale"]
        assert job.steps(0)[-1][0] == waiting, "it trained on alone"
    finally:
        job.switch.plug(second)
    until(lambda: job.liveness() == ["live", "live"], "both ranks again", 60)
    job.trains_on()
    made = job.ask(lambda client: client.set_knobs(RUN, {"stride": 6}))
    until(lambda: job.ask(lambda client: client.generations(RUN))[-1].state == "applied", "applied")
    applied = job.ask(lambda client: client.generations(RUN))[-1].applied
    assert made.state in ("committed", "applied")
    assert applied[0] == applied[1]
    actions = {row.action for row in job.ask(lambda client: client.audit(RUN))}
    assert "lost" not in actions
