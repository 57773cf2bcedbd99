"""What the database does to the daemon: refusals, newer versions, lost writes."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, event

from tests.daemon.live import ROOT, Agent, Daemon, new_run, threaded, wait_until
from tests.services import PATIENCE
from tidegate.daemon.schema import Base
from tidegate.daemon.store import WAIT_SECONDS, Store
from tidegate.daemon.tokens import digest_of
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


@pytest.mark.parametrize("table", ["alembic_version (version_num)", "schema_version (version)"])
def test_a_newer_database_is_refused(tmp_path: Path, table: str) -> None:
    connection = sqlite3.connect(tmp_path / "tidegate.db", isolation_level=None)
    name, _, column = table.partition(" ")
    connection.execute(f"CREATE TABLE {name} {column}")
    connection.execute(f"INSERT INTO {name} VALUES ('99')")
    connection.close()
    with pytest.raises(DaemonError, match="of version 99, this Tidegate knows"):
        Store(f"sqlite:///{tmp_path / 'tidegate.db'}")


def test_the_migrations_make_the_tables_that_the_code_has(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'tidegate.db'}")
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    store.close()


def test_a_database_of_before_alembic_is_brought_up_to_date(tmp_path: Path) -> None:
    """Version 1 with a run, a token and an audit row, as an earlier Tidegate left it."""
    path = tmp_path / "tidegate.db"
    engine = create_engine(f"sqlite:///{path}")
    config = Config()
    config.set_main_option("script_location", "tidegate.daemon:migrations")
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
    engine.dispose()
    for _ in range(2):  # the second finds all done
        store = Store(f"sqlite:///{path}")
        assert [(token.name, token.run, token.state(9.0)) for token in store.tokens.all()] == [("old", None, "valid")]
        assert [made.knobs for made in store.generations("llama")] == [{"stride": 3}]
        assert [row.action for row in store.audit("llama", 10)] == ["lost"]
        store.close()


@pytest.mark.parametrize(
    ("first", "statement"),
    [pytest.param("", "CREATE TABLE audit", marks=pytest.mark.slow), ("v1", "ALTER TABLE tokens")],
)
def test_whatever_statement_it_is_killed_after_it_opens_again(tmp_path: Path, first: str, statement: str) -> None:
    command = [sys.executable, "-m", "tests.daemon.killed", str(tmp_path), first]
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
