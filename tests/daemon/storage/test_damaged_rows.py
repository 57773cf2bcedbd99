"""A row of the database that cannot be read: it is left out, the rest is served, and the doctor moves it away."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.daemon.live import ROOT, Agent, Daemon, Process, hello, threaded
from tidegate.cli.doctor.daemon_state import examine_state
from tidegate.errors import DaemonError

AUDIT = "INSERT INTO audit (timestamp, actor, action, run, before, after, reason, effect) VALUES "
DAMAGE = {
    "a lone surrogate in the audit log": AUDIT + r"""(1.0, 'x', 'reset', 'bad', '{}', '{"a": "\ud800"}', '', '')""",
    "no JSON in the audit log": AUDIT + "(1.0, 'x', 'reset', 'good', '{', '{}', '', '')",
    "bytes that are no text": AUDIT + "(1.0, 'x', 'reset', 'good', '{}', '{}', CAST(x'ff41' AS TEXT), '')",
    "bytes where text was": AUDIT + "(1.0, x'ff', 'reset', 'good', '{}', '{}', '', '')",
    "no time in the audit log": AUDIT + "('abc', 'x', 'reset', 'good', '{}', '{}', '', '')",
    "an alert that is none": AUDIT + "(1.0, 'x', 'alert_firing', 'bad', '{}', '{\"fingerprint\": \"0a\"}', '', '')",
    "a lone surrogate in an alert": AUDIT + r"""(1.0, 'x', 'alert_firing', '', '{}', '{"alert": "\ud800"}', '', '')""",
    "an alert's row": "INSERT INTO alerts VALUES ('bad', '0a', '', '{}')",
    "another alert's row": "INSERT INTO alerts VALUES ('', '0a', '', '{')",
    "knobs that are none": "UPDATE generations SET knobs = '{' WHERE run = 'bad' AND number = 1",
    "knobs out of bounds": "UPDATE generations SET knobs = '{\"stride\": -5}' WHERE run = 'bad' AND number = 1",
    "the newest generation": "UPDATE generations SET state = 'odd' WHERE run = 'bad' AND number = 2",
    "every generation": "UPDATE generations SET votes = '[]', created_at = 'abc' WHERE run = 'bad'",
    "a rank's greeting": "UPDATE agents SET hello = '{}' WHERE run = 'bad'",
    "a rank's last word": "UPDATE agents SET told = '{' WHERE run = 'bad'",
    "another rank's greeting": "UPDATE agents SET hello = replace(hello, 'bad', 'good') WHERE run = 'bad'",
    "a run's time": "UPDATE runs SET created_at = 'abc' WHERE name = 'bad'",
    "a token's end": "INSERT INTO tokens VALUES ('ab', 'x', 'read', 1.0, NULL, 'abc', NULL)",
    "steps that are none": "UPDATE steps SET body = '{' WHERE step > 3",
    "steps of another kind": "UPDATE steps SET body = '{\"step\": 1}' WHERE step = 2",
}  # fmt: skip
HARMLESS = {"an alert that is none"}
"""Only read as what it is not: the audit log has it as it is."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of a daemon with two runs that ended, three generations each."""
    state = tmp_path_factory.mktemp("kept")
    with threaded(state) as daemon:
        for run in ("good", "bad"):
            agent = Agent(daemon, run, world_size=1)
            agent.train(5, 1.0)
            agent.client.goodbye(agent.id)
            for stride in (3, 4):
                daemon.client().set_knobs(run, {"stride": stride})
    return state


def damaged(kept: Path, folder: Path, *statements: str) -> Path:
    state = folder / "state"
    shutil.copytree(kept, state)
    connection = sqlite3.connect(state / "tidegate.db", isolation_level=None)
    for statement in statements:
        assert connection.execute(statement).rowcount > 0, statement
    connection.close()
    return state


def served(daemon: Daemon, runs: tuple[str, ...]) -> None:
    """Everything is answered, and of these runs all is there."""
    asked = ("/v1/runs", "/v1/audit", "/v1/alerts?runs=all", "/sd", "/metrics", "/readyz")
    for path in (*asked, *(f"/v1/runs/{run}{what}" for run in ("good", "bad") for what in QUESTIONS)):
        answer = daemon.http("GET", path)
        assert answer.status_code < 500, (path, answer.text)
        if answer.headers.get("content-type", "").startswith("application/json"):
            answer.json()
    client = daemon.client()
    assert {run.run for run in client.runs()} >= set(runs)
    for run in runs:
        assert [made.generation for made in client.generations(run)] == [0, 1, 2]
        assert client.audit(run)[-1].action == "committed"


QUESTIONS = ("", "/knobs", "/generations", "/advice", "/audit", "/alerts", "/ranks/0/steps", "/ranks/0/rates")


def changes_can_be_made(daemon: Daemon) -> None:
    """A new rank comes to each run, or is told why not, and each run that is there takes a change."""
    for run in ("good", "bad"):
        body = hello(run, world_size=1).model_dump(mode="json")
        answer = daemon.http("POST", "/v1/agents", "agent", json=body)
        assert answer.status_code in (201, 409), answer.text
        if answer.status_code == 409:
            assert (answer.json()["type"], "tidegate doctor --state" in answer.text) == ("run-damaged", True)
            assert daemon.http("GET", f"/v1/runs/{run}").json()["type"] == "run-damaged"
            continue
        daemon.http("DELETE", f"/v1/agents/{body['agent']}", "agent")
        assert daemon.client().set_knobs(run, {"stride": 5}).generation >= 1
        for to in (0, 1, 2):
            path, want = f"/v1/runs/{run}/rollback", {"to": to}
            assert daemon.http("POST", path, json=want).status_code < 500


def moved(state: Path) -> list[tuple[str, str]]:
    """What is in quarantine: table and body."""
    with sqlite3.connect(state / "tidegate.db") as connection:
        return connection.execute("SELECT source, body FROM quarantine").fetchall()


def test_damage_everywhere_at_once_is_contained_and_moved_away(kept: Path, tmp_path: Path) -> None:
    state = damaged(kept, tmp_path, *DAMAGE.values())
    with threaded(state) as daemon:
        served(daemon, ("good",))
        changes_can_be_made(daemon)
    command = [sys.executable, "-m", "tidegate", "doctor", "--state", str(state)]
    env = {**os.environ, "COLUMNS": "200"}
    first = forked.run(command, cwd=ROOT, env=env, timeout=60)
    assert (first.returncode, "Traceback" in first.stderr) == (1, False), first.stdout + first.stderr
    assert "moved to the table quarantine" in first.stdout
    assert "could not be read" in first.stdout
    assert [finding.verdict for finding in examine_state(state)] == ["good"]
    tables = {source for source, _ in moved(state)}
    assert tables == {"alerts", "audit", "generations", "agents", "runs", "tokens", "steps"}
    assert any("\\ud800" in json.dumps(json.loads(body)["after"]) for source, body in moved(state) if source == "audit")
    with threaded(state) as daemon:
        answer = daemon.http("POST", "/v1/agents", "agent", json=hello("bad").model_dump(mode="json"))
        assert answer.status_code == 201, "its name is free again"
        with (
            pytest.raises(sqlite3.IntegrityError, match="append-only"),
            sqlite3.connect(state / "tidegate.db") as again,
        ):
            again.execute("DELETE FROM audit")


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE)
def test_one_row_that_cannot_be_read(kept: Path, tmp_path: Path, name: str) -> None:
    state = damaged(kept, tmp_path, DAMAGE[name])
    with threaded(state) as daemon:
        served(daemon, ("good",))
    verdicts = [finding.verdict for finding in examine_state(state)]
    assert ("bad" in verdicts) == (name not in HARMLESS), name
    assert [finding.verdict for finding in examine_state(state)] == ["good"]
    with threaded(state) as daemon:
        served(daemon, ("good",))
        changes_can_be_made(daemon)


def test_a_generation_that_cannot_be_read_is_not_written_over(kept: Path, tmp_path: Path) -> None:
    state = damaged(kept, tmp_path, DAMAGE["the newest generation"])
    with threaded(state) as daemon:
        assert daemon.client().set_knobs("bad", {"stride": 7}).generation == 3
        with pytest.raises(DaemonError, match="generation 2 of run 'bad' cannot be read"):
            daemon.client().roll_back("bad", 2)


def test_nothing_is_moved_while_a_daemon_runs(kept: Path, tmp_path: Path) -> None:
    state = damaged(kept, tmp_path, DAMAGE["no JSON in the audit log"])
    with Process(state) as process:
        process.start()
        told = [finding.detail for finding in examine_state(state)]
        assert "cannot be read" in told[0]
        assert told[-1].startswith("nothing was moved: Another daemon (process ")
    assert moved(state) == []


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "tidegate.db").write_bytes(b"x" * 5000)
    (finding,) = examine_state(tmp_path)
    assert finding.verdict == "bad"
    assert "cannot be opened" in finding.detail
