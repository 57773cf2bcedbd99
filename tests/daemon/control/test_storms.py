"""Many at once, and daemons that die: one winner for each generation, nothing acknowledged is lost."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.daemon.live import Agent, Daemon, Process, new_run, wait_until
from tidegate.client.daemon_client import DaemonClient
from tidegate.errors import DaemonError, DaemonUnreachable, StaleKnobs
from tidegate.wire.knobs import GenerationView

CLIENTS = 32


class Watcher(Agent):
    """An agent that notes every generation that it is given."""

    def __init__(self, daemon: Daemon, run: str, rank: int) -> None:
        self.seen: list[int] = []
        super().__init__(daemon, run, rank)

    def take(self, directive: object) -> None:
        self.seen.append(directive.committed)  # type: ignore[attr-defined]
        super().take(directive)  # type: ignore[arg-type]


def stormy(won: list[GenerationView], made: list[GenerationView]) -> bool:
    """Whether many came through and somebody was skipped."""
    return len(won) > CLIENTS / 4 and any(generation.state == "superseded" for generation in made)


def storm(daemon: Daemon, seconds: float) -> None:
    run, client = new_run(), daemon.client()
    agents = [Watcher(daemon, run, rank) for rank in range(2)]
    end = time.monotonic() + seconds
    latest = end + 60  # a slow machine needs longer until it is a storm
    won: list[GenerationView] = []

    def goes_on(mine: DaemonClient) -> bool:
        now = time.monotonic()
        return now < end or (now < latest and not stormy(won, mine.generations(run)))

    def patch(number: int) -> None:
        """Reads, changes, and does so again when somebody was faster."""
        made = random.Random(number)
        with DaemonClient(daemon.url, daemon.tokens["operate"], 30.0) as mine:
            while goes_on(mine):
                try:
                    stride = made.randrange(1, 1000)
                    won.append(mine.set_knobs(run, {"stride": stride}, reason=str(number), wait=made.choice((0, 0.2))))
                except StaleKnobs:
                    continue

    with agents[0].answering(), agents[1].answering():
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(patch, range(CLIENTS)))
        wait_until(lambda: client.generations(run)[-1].state == "applied", "the newest applied", 30)

    made = client.generations(run)
    numbers = Counter(generation.generation for generation in won)
    assert stormy(won, made)
    assert set(numbers.values()) == {1}, "two winners of one generation"
    assert sorted(numbers) == [generation.generation for generation in made[1:]] == list(range(1, len(made)))
    by_number = {generation.generation: generation for generation in won}
    assert all(g.changes == by_number[g.generation].changes for g in made[1:]), "what was acknowledged is what is kept"
    assert {g.state for g in made[1:-1]} <= {"superseded", "committed", "applied"}
    rows = audit(daemon, run)
    assert [row["id"] for row in rows] == sorted({row["id"] for row in rows})
    proposed = [row["generation"] for row in rows if row["action"] == "proposed"]
    assert proposed == list(range(1, len(made))), "the audit log has every change, in order"
    ends = Counter(row["generation"] for row in rows if row["action"] in ("committed", "superseded"))
    assert set(ends.values()) == {1}
    assert set(ends) == set(proposed)
    for agent in agents:
        assert agent.seen == sorted(agent.seen), "an older generation after a newer one"
        assert agent.generation == made[-1].generation


def audit(daemon: Daemon, run: str) -> list[dict[str, object]]:
    answer = daemon.http("GET", f"/v1/runs/{run}/audit", params={"limit": 5_000})
    rows: list[dict[str, object]] = answer.json()
    return rows


def test_32_clients_at_once(daemon: Daemon) -> None:
    storm(daemon, 2.0)


@pytest.mark.torture
def test_32_clients_for_30_seconds(daemon: Daemon) -> None:
    storm(daemon, 30.0)


def kill_again_and_again(state: Path, times: int) -> int:
    """Changes without pause; kill -9 at a random moment; what was answered must be there when it starts again. Returns
    the number of acknowledged changes."""
    port = str(_free_port())
    acknowledged: dict[str, list[GenerationView]] = {"a": [], "b": []}
    pace = random.Random(7)
    with Process(state, ("--port", port)) as process:
        daemon = process.start()
        for run in acknowledged:
            agent = Agent(daemon, run)
            agent.client.goodbye(agent.id)
        living = Agent(daemon, "living")
        for _ in range(times):
            stop = threading.Event()
            writers = [
                threading.Thread(target=_write, args=(daemon, run, made, stop)) for run, made in acknowledged.items()
            ]
            for writer in writers:
                writer.start()
            counts = {run: len(made) for run, made in acknowledged.items()}
            wait_until(lambda before=counts: all(len(acknowledged[r]) > before[r] for r in before), "changes")
            stop.wait(pace.uniform(0, 0.05))
            process.end(signal.SIGKILL)
            stop.set()
            for writer in writers:
                writer.join(30)
            daemon = process.start()
            client = daemon.client()
            for run, made in acknowledged.items():
                kept = {generation.generation: generation for generation in client.generations(run)}
                assert all(kept.get(g.generation) == g for g in made), "an acknowledged change is lost"
                assert sorted(kept) == list(range(len(kept)))
                rows = [row["generation"] for row in audit(daemon, run) if row["action"] == "proposed"]
                assert rows == sorted(rows)
                assert {g.generation for g in made[-100:]} <= set(rows)
            living.client = daemon.client("agent")
            living.say()  # it is known still, without another hello
            assert client.run("living").liveness == "live"
        assert client.generations("living")[0].knobs == living.message.knobs
    return sum(map(len, acknowledged.values()))


def _write(daemon: Daemon, run: str, made: list[GenerationView], stop: threading.Event) -> None:
    with DaemonClient(daemon.url, daemon.tokens["operate"]) as client:
        while not stop.is_set():
            try:
                made.append(client.set_knobs(run, {"stride": 1 + len(made) % 99}))
            except (DaemonUnreachable, DaemonError):
                return


def _free_port() -> int:
    from tests.daemon.live import listen

    with listen() as taken:
        port: int = taken.getsockname()[1]
        return port


@pytest.mark.slow
def test_kill_9_five_times(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 5)


@pytest.mark.torture
def test_kill_9_a_hundred_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    acknowledged = kill_again_and_again(tmp_path, 100)
    with capsys.disabled():
        print(f"\n100 kills of the daemon, {acknowledged} acknowledged changes, none lost")
