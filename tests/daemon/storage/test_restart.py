"""The daemon as a process: it dies, ends, starts again, or cannot start."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.live import Agent, Process, listen, new_run, step_report, wait_until
from tidegate.client.daemon_client import DaemonClient
from tidegate.errors import DaemonUnreachable
from tidegate.wire.agent import Rates
from tidegate.wire.canary import CanaryRequest

RATES = Rates(
    h2d_bytes_per_second=2e10, d2h_bytes_per_second=2e10, cpu_params_per_second=1e9, device_params_per_second=9e9,
    norm_params_per_second=4e10,
)  # fmt: skip


def test_kill_9_loses_nothing_acknowledged(tmp_path: Path) -> None:
    run = new_run()
    with Process(tmp_path) as process:
        daemon = process.start()
        agent, idle = Agent(daemon, run), Agent(daemon, "idle")
        idle.client.goodbye(idle.id)
        client = daemon.client()
        for stride in (3, 4, 5):
            client.set_knobs("idle", {"stride": stride}, reason=f"try {stride}")
        with agent.answering():
            assert client.set_knobs(run, {"stride": 6}).state == "committed"
            wait_until(lambda: client.generations(run)[1].state == "applied", "applied")
        client.set_knobs(run, {"stride": 7}, wait=0)
        before = {name: (client.generations(name), client.audit(name)) for name in (run, "idle")}
        process.end(signal.SIGKILL)

        again = process.start()
        client = again.client()
        assert client.generations("idle") == before["idle"][0]
        assert client.audit("idle") == before["idle"][1]
        assert client.knobs("idle").desired["stride"] == 5.0
        kept, pending = client.generations(run)[:2], client.generations(run)[2]
        assert kept == before[run][0][:2]
        assert (pending.state, "restarted" in pending.outcome) == ("aborted", True), "nobody can vote on it any more"
        assert [row.action for row in client.audit(run)] == [row.action for row in before[run][1]] + ["aborted"]
        assert {view.run: view.liveness for view in client.runs()} == {run: "stale", "idle": "finished"}

        # The rank may still be there: it is asked, and goes on with the same id, hello or not.
        assert client.set_knobs(run, {"stride": 8}, wait=0).state == "proposed"
        agent.client = again.client("agent")
        agent.say()
        agent.client.hello(agent.message)
        agent.answer()
        agent.answer()
        assert (client.generations(run)[3].state, client.run(run).liveness) == ("applied", "live")
        code, _, text = process.end(signal.SIGTERM)
        assert (code, "Traceback" in text) == (0, False), text


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_what_ended_is_shown_after_a_restart_as_it_was_before(tmp_path: Path, how: signal.Signals) -> None:
    """A run of two ranks that ended: its figures, its steps, its knobs and what the ranks had of them."""
    run, silent = new_run(), new_run()
    with Process(tmp_path) as process:
        daemon = process.start()
        ranks = [Agent(daemon, run, rank).begin() for rank in range(2)]
        for rank in ranks:
            rank.train(30, 1.0 + rank.message.rank)
            rank.say(phase="update", predicted_update_seconds=1.5, rates=RATES, effective={"stride": 4.0})
            rank.client.goodbye(rank.id)
        left = Agent(daemon, silent).begin()
        left.train(5, 1.0)
        client = daemon.client()
        before = seen(client, run)
        assert before["run"].totals.step_seconds == 2.1
        wait_until(lambda: stored(tmp_path) == 65, "steps that are written")
        process.end(how)

        again = process.start().client()
        assert seen(again, run) == before
        assert again.run(silent).ranks[0].last_step.step == 5
        listed = {view.run: view for view in again.runs()}
        assert listed[run] == before["run"]


def seen(client: DaemonClient, run: str) -> dict[str, Any]:
    """All that is told of a run that ended."""
    return {
        "run": client.run(run),
        "steps": [client.steps(run, rank) for rank in range(2)],
        "knobs": client.knobs(run),
        "generations": client.generations(run),
        "rates": [client.rates(run, rank) for rank in range(2)],
    }


def stored(state: Path) -> int:
    """How many steps are on disk."""
    with contextlib.closing(sqlite3.connect(state / "tidegate.db")) as connection:
        return int(connection.execute("SELECT count(*) FROM steps").fetchone()[0])


def test_steps_outlive_the_daemon_and_a_trial_begins_with_them(tmp_path: Path) -> None:
    run = new_run()
    with Process(tmp_path) as process:
        daemon = process.start()
        agent = Agent(daemon, run).begin()
        agent.train(150, 1.0)
        agent.train(150, 1.0)
        told = daemon.client().steps(run, 0, limit=256)
        assert [step.step for step in told.steps] == [*range(45, 301)]
        process.end(signal.SIGTERM)

        again = process.start()
        client, agent.client = again.client(), again.client("agent")
        assert client.steps(run, 0, limit=256) == told
        assert client.run(run).ranks[0].last_step == told.steps[-1]
        agent.say(steps=(*told.steps[-2:], step_report(301, 1.0)))
        assert [step.step for step in client.steps(run, 0, limit=3).steps] == [299, 300, 301], "told twice, kept once"
        made = client.set_knobs(run, {"stride": 6}, canary=CanaryRequest(steps=20), wait=0)
        assert (made.state, made.canary and made.canary.state) == ("proposed", "waiting"), (
            "it has steps to compare with"
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_promptly_whoever_waits(tmp_path: Path, number: int) -> None:
    with Process(tmp_path) as process:
        daemon = process.start()
        run = new_run()
        agent = Agent(daemon, run)
        written = json.loads((tmp_path / "daemon.json").read_text())
        assert written["url"] == daemon.url
        client, ended, following = daemon.client(), list[str](), threading.Event()

        def poll() -> None:
            with contextlib.suppress(DaemonUnreachable):  # should it come only after the end
                agent.client.directive(agent.id, 0, None, 60.0)
            ended.append("poll")

        def follow() -> None:
            for _ in client.events(run, last_event_id=0):
                following.set()
            ended.append("events")

        waiting = [threading.Thread(target=poll), threading.Thread(target=follow)]
        for thread in waiting:
            thread.start()
        assert following.wait(10)
        code, seconds, text = process.end(number)
        assert (code, seconds < 10.0, "Traceback" in text) == (0, True, False), (seconds, text)
        assert f"Tidegate daemon at {daemon.url}" in text
        for thread in waiting:
            thread.join(5)
        assert sorted(ended) == ["events", "poll"]
        assert not (tmp_path / "daemon.json").exists()
        with DaemonClient(daemon.url) as gone, pytest.raises(DaemonUnreachable, match="No daemon answers at"):
            gone.runs()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with listen() as taken:
        port = taken.getsockname()[1]
        with Process(tmp_path, ("--port", str(port))) as process, pytest.raises(AssertionError) as error:
            process.start()
        assert process.process is not None
        assert process.process.returncode == 1
    assert f"tidegate: Port {port} on 127.0.0.1 is taken" in str(error.value)
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--bind", "203.0.113.1"), "cannot listen on 203.0.113.1"),
        (("--bind", "no.such.host.invalid"), "cannot listen on no.such.host.invalid"),
        (("--database-url", "nonsense://x"), "cannot be opened"),
        (("--database-url", "sqlite:////nowhere/at/all.db"), "cannot be opened"),
        (("--state-dir", "/proc/nowhere"), "cannot be made"),
    ],
)
def test_what_cannot_start_says_so(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    with Process(tmp_path, ("--port", "0", *arguments)) as process, pytest.raises(AssertionError) as error:
        process.start()
    assert process.process is not None
    assert process.process.returncode == 1
    assert said in str(error.value)
    assert "Traceback" not in str(error.value)


def test_two_daemons_do_not_share_a_state(tmp_path: Path) -> None:
    with Process(tmp_path) as first, Process(tmp_path) as second:
        url = first.start().url
        pid = first.process.pid if first.process else 0
        second_start = Process(tmp_path)
        with second_start, pytest.raises(AssertionError, match=f"process {pid}"):
            second_start.start(keep=True)
        with DaemonClient(url) as client:
            assert client.health()
        assert second.process is None
