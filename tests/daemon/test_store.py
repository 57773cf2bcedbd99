"""What the database does to the daemon: refusals, newer versions, lost writes."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.daemon.live import Agent, Daemon, new_run
from tidegate.daemon.store import Store
from tidegate.errors import DaemonError


def test_what_cannot_be_stored_is_not_decided(daemon: Daemon) -> None:
    run, client = new_run(), daemon.client()
    agent = Agent(daemon, run)
    agent.client.goodbye(agent.id)
    connection = sqlite3.connect(daemon.state / "tidegate.db", isolation_level=None)
    connection.execute(
        f"CREATE TRIGGER full BEFORE INSERT ON generations WHEN NEW.run = '{run}' "
        "BEGIN SELECT RAISE(ABORT, 'no space left'); END"
    )
    try:
        with pytest.raises(DaemonError, match=r"failed with IntegrityError; the daemon's log says more") as error:
            client.set_knobs(run, {"stride": 3})
        assert error.value.status == 500
        assert (client.knobs(run).generation, client.audit(run)[-1].action) == (0, "goodbye")
    finally:
        connection.execute("DROP TRIGGER full")
        connection.close()
    assert client.set_knobs(run, {"stride": 3}).generation == 1


def test_a_newer_database_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'tidegate.db'}"
    Store(url).close()
    connection = sqlite3.connect(tmp_path / "tidegate.db", isolation_level=None)
    connection.execute("INSERT INTO schema_version VALUES (99)")
    connection.close()
    with pytest.raises(DaemonError, match="of version 99, this Tidegate knows 1: install a newer Tidegate"):
        Store(url)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(DaemonError) as error:
        Store("nonsense://user:secret@host/db")
    assert "secret" not in str(error.value)
