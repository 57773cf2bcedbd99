"""SQLAlchemy engines for the database: durability, write locks and their timeouts, and read-only transactions."""

from __future__ import annotations

import functools
import sqlite3
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import create_engine, event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import OperationalError
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from tidegate.daemon.storage.row_reader import json_of, text_of

BUSY_SECONDS: Final = 5.0
"""Longest wait in seconds for the database's write lock while another process holds it: in a daemon that starts, and in
other programs of Tidegate that open the database."""
WAIT_SECONDS: Final = 1.0
"""Longest wait in seconds for the database's write lock while another process holds it, in a daemon that serves
requests."""
_ONLY_READS: Final = "tidegate_only_reads"
_LOCK_TIMEOUT: Final = "tidegate_lock_timeout"


@dataclass(slots=True)
class LockTimeout:
    """How long a write transaction waits for the write lock while another process holds it."""

    seconds: float = BUSY_SECONDS
    gave_up: bool = False
    """Whether a transaction has waited for the lock without success. If so, each later transaction tries only once,
    without a wait; the first one that obtains the lock sets this to False."""
    at_once: bool = False
    """Whether the next transaction tries to get the lock only once, and fails at once if another process holds it."""


def is_busy(error: OperationalError) -> bool:
    """Whether another process holds SQLite's write lock."""
    return isinstance(error.orig, sqlite3.OperationalError) and "is locked" in str(error.orig)


def engine_for(url: str, synchronous: Literal["FULL", "NORMAL"], timeout: LockTimeout) -> Engine:
    """An SQLAlchemy engine for `url`, with SQLite's setting `synchronous`.

    FULL: a committed change survives a power failure. NORMAL: a committed change survives the end of the process, and
    the commit does not wait for the disk.
    """
    if not url.startswith("sqlite"):
        return create_engine(url)
    engine = create_engine(url, json_deserializer=json_of)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", functools.partial(_configure, synchronous))
        event.listen(engine, "begin", functools.partial(_begin, timeout))
    return engine


def read_only(engine: Engine) -> Engine:
    """The same engine with an option that marks its transactions as read-only."""
    return engine.execution_options(**{_ONLY_READS: True})


def with_lock_timeout(engine: Engine, timeout: LockTimeout) -> Engine:
    """The same engine, whose transactions wait for the write lock as `timeout` says."""
    return engine.execution_options(**{_LOCK_TIMEOUT: timeout})


def only_reads(connection: Connection) -> bool:
    """Whether the connection is of an engine made by `read_only`."""
    return bool(connection.get_execution_options().get(_ONLY_READS))


def _configure(synchronous: str, connection: Any, _: Any) -> None:
    """Sets up a new connection to SQLite: WAL mode, timeouts, durability."""
    if isinstance(connection, sqlite3.Connection):
        connection.text_factory = text_of
        connection.execute(f"PRAGMA busy_timeout={1000 * BUSY_SECONDS:.0f}")
        _change_to_wal(connection)
        connection.execute(f"PRAGMA synchronous={synchronous}")
        # A checkpoint (moving the log into the database file) waits for the disk. The step writer's connections make a
        # checkpoint after fewer pages, so that the changes of the control plane need not wait for one.
        connection.execute(f"PRAGMA wal_autocheckpoint={1_000 if synchronous == 'NORMAL' else 10_000}")
        connection.isolation_level = None  # else Python commits before DDL and begins too late: see `_begin`


@retry(
    retry=retry_if_exception_type(sqlite3.OperationalError), wait=wait_fixed(0.01), stop=stop_after_delay(BUSY_SECONDS),
    reraise=True,
)  # fmt: skip
def _change_to_wal(connection: sqlite3.Connection) -> None:
    """Changes the database to WAL mode. Retries while another process does the same: SQLite itself does not wait."""
    connection.execute("PRAGMA journal_mode=WAL")


def _begin(timeout: LockTimeout, connection: Connection) -> None:
    """Begins a transaction: BEGIN IMMEDIATE for one that may write, so that concurrent writers wait for each other.

    With a plain BEGIN, a transaction that reads first could fail to write later. A transaction that only reads begins
    with a plain BEGIN, and does not wait for writers.
    """
    if only_reads(connection):
        connection.exec_driver_sql("BEGIN")
        return
    timeout = connection.get_execution_options().get(_LOCK_TIMEOUT, timeout)
    wait = 0.0 if timeout.gave_up or timeout.at_once else timeout.seconds
    connection.exec_driver_sql(f"PRAGMA busy_timeout={1000 * wait:.0f}")
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    except OperationalError as error:
        if wait:
            timeout.gave_up = timeout.seconds < BUSY_SECONDS and is_busy(error)
        raise
    timeout.gave_up = timeout.at_once = False
