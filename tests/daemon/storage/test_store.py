"""What the database does to the daemon: refusals, newer versions, lost writes."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, event

from tests.daemon.live import ROOT, Agent, Daemon, new_run, threaded, wait_until
from tests.services import PATIENCE
from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.control import turns
from tidegate.daemon.problems import ProblemError
from tidegate.daemon.storage.engines import WAIT_SECONDS
from tidegate.daemon.storage.open_database import open_store
from tidegate.daemon.storage.schema import Base
from tidegate.daemon.storage.store import Store
from tidegate.daemon.storage.token_table import digest_of
from tidegate.errors import DaemonError


def test_what_cannot_be_stored_is_not_decided(tmp_path: Path) -> None:
    """The database may not grow, as on a full disk: 503 with the reason, and what was decided before stands."""
    with threaded(tmp_path) as daemon:
        run, client, made = new_run(), daemon.client(), 0
        agent = Agent(daemon, run)
        agent.client.goodbye(agent.id)
        engine = daemon.app.state.plane.store.engine
        with sqlite3.connect(tmp_path / "tidegate.db") as connection:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.close()

        def bound(connection: Any, *_: Any) -> None:
            connection.execute(f"PRAGMA max_page_count={pages}")

        def change() -> None:
            nonlocal made
            while True:
                client.set_knobs(run, {"stride": 3 + made % 2}, reason="x" * 200)
                made += 1

        event.listen(engine, "checkout", bound)
        with pytest.raises(DaemonError, match=r"its disk is full .* Nothing was changed") as error:
            change()
        assert error.value.status == 503
        assert client.knobs(run).generation == made
        assert client.audit(run)[-1].action == ("committed" if made else "goodbye")
        event.remove(engine, "checkout", bound)
        pages = 1 << 30
        event.listen(engine, "checkout", bound)
        assert client.set_knobs(run, {"stride": 5}).generation == made + 1


def test_who_reads_waits_for_no_writer(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tidegate.db'}")
    token = store.tokens.issue("agent", "mine")
    writer = sqlite3.connect(tmp_path / "tidegate.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")  # a read that wanted the lock would fail after BUSY_SECONDS
    assert store.tokens.find(digest_of(token)) == store.tokens.all()[0]
    assert store.steps.newest("none", 1) == []
    assert store.steps.newest_numbers() == {}
    assert [row.action for row in store.audit(None, 10)] == ["token_created"]
    writer.close()
    store.close()


def test_a_writer_elsewhere_holds_up_nothing_but_changes(tmp_path: Path) -> None:
    """Changes are told to come again, at once but for the first; questions and reports are answered as ever."""
    with threaded(tmp_path) as daemon:
        agent, headers = Agent(daemon, "llama").begin(), {"If-Match": "*"}
        writer = sqlite3.connect(tmp_path / "tidegate.db", isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
        begin = time.monotonic()
        for stride in range(2, 12):
            body = {"changes": {"stride": stride}}
            answer = daemon.http("PATCH", "/v1/runs/llama/knobs", json=body, headers=headers)
            assert (answer.status_code, answer.json()["type"]) == (503, "store-busy"), answer.text
            assert int(answer.headers["retry-after"]) >= 1
            agent.say(step=stride)
            assert daemon.http("GET", "/v1/runs/llama").json()["step"] == stride
        assert time.monotonic() - begin < PATIENCE * WAIT_SECONDS + 5
        ready = daemon.http("GET", "/readyz", None)
        assert (ready.status_code, "write lock" in ready.json()["detail"]) == (503, True), ready.text
        assert int(ready.headers["retry-after"]) >= 1
        assert daemon.http("GET", "/healthz", None).status_code == 200
        writer.execute("ROLLBACK")
        wait_until(lambda: daemon.http("GET", "/readyz", None).status_code == 200, "a daemon that is ready")
        assert daemon.client().set_knobs("llama", {"stride": 9}, wait=0).generation == 1
        writer.close()


SLOW = (
    "CREATE TRIGGER slow BEFORE INSERT ON {} BEGIN SELECT count(*) FROM (WITH RECURSIVE numbers(n) AS "
    "(SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 3000000) SELECT n FROM numbers); END"
)


def waits(done: threading.Event, *questions: Callable[[], object]) -> list[float]:
    """How long each of the questions took that were asked until `done`, the longest last; each once at least."""
    found = []
    while True:
        for ask in questions:
            begin = time.monotonic()
            ask()
            found.append(time.monotonic() - begin)
        if done.is_set():
            return sorted(found)


def change(daemon: Daemon, run: str, stride: int, match: str = "*") -> httpx.Response:
    body, headers = {"changes": {"stride": stride}}, {"If-Match": match}
    return daemon.http("PATCH", f"/v1/runs/{run}/knobs", json=body, headers=headers)


def test_a_change_that_waits_for_the_write_lock_holds_up_nobody(tmp_path: Path) -> None:
    with threaded(tmp_path) as daemon, ThreadPoolExecutor(4) as pool:
        agent, done = Agent(daemon, "llama").begin(), threading.Event()
        writer = sqlite3.connect(tmp_path / "tidegate.db", isolation_level=None, check_same_thread=False)
        writer.execute("BEGIN IMMEDIATE")
        begin = time.monotonic()
        changes = [pool.submit(change, daemon, "llama", stride) for stride in (3, 4)]
        changes[0].add_done_callback(lambda _: done.set())
        took = waits(done, lambda: daemon.http("GET", "/v1/runs/llama").raise_for_status(), agent.say)
        assert len(took) >= 8, "an event loop that waits for the lock answers four times at most"
        assert median(took) < 0.2
        answers = [made.result() for made in changes]
        assert time.monotonic() - begin >= WAIT_SECONDS
        assert [(a.status_code, a.json()["type"]) for a in answers] == [(503, "store-busy")] * 2
        writer.execute("ROLLBACK")
        wait_until(lambda: daemon.http("GET", "/readyz", None).status_code == 200, "a daemon that is ready")
        writer.execute("BEGIN IMMEDIATE")
        made = pool.submit(change, daemon, "llama", 5)
        agent.say(step=1_000)
        writer.execute("ROLLBACK")
        assert made.result().json()["generation"] == 1  # it waited for its turn
        writer.close()


def test_a_slow_disk_holds_up_changes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions are answered during a write that takes a second; of two changes to one generation one is made."""
    monkeypatch.setattr(turns, "TURN_SECONDS", 60.0)  # on a machine that is busy the write takes longer
    with threaded(tmp_path) as daemon, ThreadPoolExecutor(4) as pool:
        agent, done = Agent(daemon, "llama").begin(), threading.Event()
        agent.client.goodbye(agent.id)
        connection = sqlite3.connect(tmp_path / "tidegate.db", isolation_level=None)
        connection.execute(SLOW.format("generations"))
        connection.close()
        begin = time.monotonic()
        changes = [pool.submit(change, daemon, "llama", stride, '"0"') for stride in (3, 4)]
        changes[0].add_done_callback(lambda _: done.set())
        took = waits(done, lambda: daemon.http("GET", "/v1/runs/llama").raise_for_status())
        written = time.monotonic() - begin
        answers = sorted(made.result().status_code for made in changes)
        assert len(took) >= 4, f"an event loop that waits for the write of {written:.2f} s answers twice at most"
        assert median(took) < 0.2
        assert answers == [200, 412]
        assert daemon.client().knobs("llama").generation == 1


def test_who_waits_too_long_for_a_turn_is_told_to_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.1)
    store = Store(f"sqlite:///{tmp_path / 'tidegate.db'}")
    with store.engine.begin() as connection:
        connection.exec_driver_sql(SLOW.format("counters"))

    async def both() -> int:
        made = turns.Turns(store)
        first = asyncio.create_task(made.do(store.reserve, "events", 1))
        await asyncio.sleep(0)
        with pytest.raises(ProblemError, match=r"within 0\.1 s: nothing was changed") as error:
            await made.do(store.reserve, "events", 1)
        assert (error.value.status, error.value.type) == (503, "store-busy")
        return await first

    assert asyncio.run(both()) > 0
    store.close()


def test_a_run_that_cannot_be_stored_keeps_no_other_waiting(tmp_path: Path) -> None:
    """Of two runs with ranks that are lost, one cannot be stored: the other's are told."""
    with threaded(tmp_path, lease_seconds=0.2) as daemon:
        bad, good = Agent(daemon, "a-bad"), Agent(daemon, "good")
        connection = sqlite3.connect(tmp_path / "tidegate.db", isolation_level=None)
        connection.execute(
            "CREATE TRIGGER full BEFORE INSERT ON audit WHEN NEW.run = 'a-bad' BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        connection.close()
        client = daemon.client("read")
        wait_until(lambda: "lost" in [row.action for row in client.audit(good.message.run)], "a lost rank", 5)
        assert "lost" not in [row.action for row in client.audit(bad.message.run)]


@pytest.mark.parametrize("table", ["alembic_version (version_num)", "schema_version (version)"])
def test_a_newer_database_is_refused(tmp_path: Path, table: str) -> None:
    connection = sqlite3.connect(tmp_path / "tidegate.db", isolation_level=None)
    name, _, column = table.partition(" ")
    connection.execute(f"CREATE TABLE {name} {column}")
    connection.execute(f"INSERT INTO {name} VALUES ('99')")
    connection.close()
    with pytest.raises(DaemonError, match="has version 99, which this Tidegate does not know"):
        Store(f"sqlite:///{tmp_path / 'tidegate.db'}")


def test_the_migrations_make_the_tables_that_the_code_has(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tidegate.db'}")
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    store.close()


FACTS = '"alert": "A", "severity": "warning", "knob": "none", "runbook_url": "", "starts_at": 1.0'
OLD_ALERTS = (
    ("alert_firing", "llama", f'{{"fingerprint": "0a", {FACTS}}}'),
    ("alert_firing", "", f'{{"fingerprint": "0b", "label_cause": "h2d", {FACTS}}}'),
    ("alert_firing", "llama", '{"fingerprint": "0c"}'),
    ("alert_firing", "llama", "{"),
    ("alert_resolved", "llama", f'{{"fingerprint": "0a", "ends_at": 2.0, {FACTS}}}'),
)


def test_a_database_of_before_alembic_is_brought_up_to_date(tmp_path: Path) -> None:
    """Version 1 with a run, a token and an audit row, as an earlier Tidegate left it."""
    path = tmp_path / "tidegate.db"
    engine = create_engine(f"sqlite:///{path}")
    config = Config()
    config.set_main_option("script_location", "tidegate.daemon.storage:migrations")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "v1")
        connection.exec_driver_sql("DROP TABLE alembic_version")
        connection.exec_driver_sql("CREATE TABLE schema_version (version INTEGER PRIMARY KEY)")
        connection.exec_driver_sql("INSERT INTO schema_version VALUES (1)")
        connection.exec_driver_sql("INSERT INTO tokens VALUES ('d', 'old', 'operate', 1.0)")
        connection.exec_driver_sql("INSERT INTO runs VALUES ('llama', 1.0)")
        connection.exec_driver_sql(
            "INSERT INTO generations VALUES ('llama', 0, 'applied', '{\"stride\": 3}', '{}', 'ada', '', 1.0, 1.0, '',"
            " '{}', '{}', NULL)"
        )
        connection.exec_driver_sql(
            "INSERT INTO audit VALUES (1, 1.0, 'ada', 'lost', 'llama', NULL, '{}', '{}', '', '')"
        )
        for number, (action, run, facts) in enumerate(OLD_ALERTS, 2):
            connection.exec_driver_sql(
                "INSERT INTO audit VALUES (?, 9.0, 'alert', ?, ?, NULL, '{}', ?, 'waits', 'for h2d')",
                (number, action, run, facts),
            )
    engine.dispose()
    for _ in range(2):  # the second finds all done
        store = Store(f"sqlite:///{path}")
        assert [(token.name, token.run, token.state(9.0)) for token in store.tokens.all()] == [("old", None, "valid")]
        assert [made.knobs for made in store.generations("llama")] == [{"stride": 3}]
        assert store.audit("llama", 10)[0].action == "lost"
        told = [(a.view.run, a.view.state, a.view.summary, a.view.labels, a.owner) for a in store.alerts.all()]
        assert sorted(told) == [("", "firing", "waits", {"cause": "h2d"}, ""), ("llama", "resolved", "waits", {}, "")]
        store.close()


@pytest.mark.parametrize(
    ("first", "statement"),
    [pytest.param("", "CREATE TABLE audit", marks=pytest.mark.slow), ("v1", "ALTER TABLE tokens")],
)
def test_whatever_statement_it_is_killed_after_it_opens_again(tmp_path: Path, first: str, statement: str) -> None:
    command = [sys.executable, "-m", "tests.daemon.storage.killed", str(tmp_path), first]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert statement in done.stdout


def test_two_that_open_a_new_database_at_once(tmp_path: Path) -> None:
    url, together = f"sqlite:///{tmp_path / 'tidegate.db'}", threading.Barrier(4)

    def start(_: int) -> None:
        together.wait()
        Store(url).close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(start, range(4)))


def test_the_audit_log_cannot_be_replaced(daemon: Daemon) -> None:
    agent = Agent(daemon, new_run())
    agent.client.goodbye(agent.id)
    connection = sqlite3.connect(daemon.state / "tidegate.db")
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        connection.execute("INSERT OR REPLACE INTO audit SELECT * FROM audit")
    connection.close()


def test_a_password_is_not_shown() -> None:
    with pytest.raises(DaemonError) as error:
        Store("nonsense://user:secret@host/db")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file::memory:?cache=shared&uri=true"])
def test_a_database_in_memory_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(DaemonError, match=r"is a database in memory.*name a file"):
        open_store(Settings(state_dir=tmp_path, database_url=url))


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("INSERT INTO alembic_version VALUES ('other')", "states 2 versions .*must have one row.*delete the wrong"),
        ("DROP TABLE alembic_version", "has tables .agents, .* because alembic_version is missing.*restore a backup"),
        ("DELETE FROM alembic_version", "has tables .agents, .* because alembic_version is missing.*restore a backup"),
    ],
)
def test_a_database_that_tells_no_version_is_refused_and_left_as_it_is(
    tmp_path: Path, statement: str, said: str
) -> None:
    settings = Settings(state_dir=tmp_path)
    open_store(settings).close()
    with contextlib.closing(sqlite3.connect(settings.database, isolation_level=None)) as opened:
        opened.execute(statement)
        tables = opened.execute("SELECT name FROM sqlite_schema ORDER BY name").fetchall()
        with pytest.raises(DaemonError, match=said):
            open_store(settings)
        assert opened.execute("SELECT name FROM sqlite_schema ORDER BY name").fetchall() == tables
