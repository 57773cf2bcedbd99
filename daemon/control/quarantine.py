"""Finds unreadable rows of an SQLite database and moves them into the table `quarantine`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Select, insert, literal_column, select, text
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session

from tidegate.daemon.decisions.generations import COMMITTED_STATES
from tidegate.daemon.storage.alert_table import alert_of
from tidegate.daemon.storage.records import agent_of, audit_of, generation_of, run_of
from tidegate.daemon.storage.row_reader import key_of, reason
from tidegate.daemon.storage.schema import (
    AgentRow,
    AlertRow,
    AuditEntry,
    Base,
    GenerationRow,
    QuarantineRow,
    RunRow,
    StepRow,
    TokenRow,
)
from tidegate.daemon.storage.store import Store
from tidegate.daemon.storage.token_table import token_of
from tidegate.wire.step import StepReport

NO_GENERATION: Final = "none of its run's generations that were committed can be read"
_KEEPS_AUDIT: Final = "audit_no_delete"


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A row that cannot be read, or that depends on a row that cannot be read."""

    table: str
    rowid: int
    key: tuple[Any, ...]
    why: str
    body: dict[str, Any]
    """The row's values by column."""


def find(store: Store) -> list[Damaged]:
    """Finds all damaged rows of the database."""
    with Session(store.engine) as session:
        found = [damaged for row, make in _READERS for damaged in _damaged(session, row, make)]
        unreadable = {(damaged.table, damaged.rowid) for damaged in found}
        good = {
            run
            for rowid, run, state in _columns(session, GenerationRow, "run", "state")
            if state in COMMITTED_STATES and ("generations", rowid) not in unreadable
        } & {name for rowid, name in _columns(session, RunRow, "name") if ("runs", rowid) not in unreadable}
        for row, column in ((RunRow, "name"), (GenerationRow, "run"), (AgentRow, "run")):
            for rowid, made in _rows(session, row):
                if getattr(made, column) not in good and (row.__tablename__, rowid) not in unreadable:
                    found.append(_damaged_row(made, rowid, NO_GENERATION))
    return found


def move(store: Store, found: list[Damaged]) -> None:
    """Moves the damaged rows into the quarantine table in one transaction.

    If audit rows are among them, the trigger that makes the audit log append-only is dropped before and created again.
    """
    now = time.time()
    with store.engine.begin() as connection:
        rows = [{"at": now, "source": d.table, "why": d.why, "body": json.dumps(d.body, default=_shown)} for d in found]
        connection.execute(insert(QuarantineRow), rows)
        trigger = _trigger(connection) if any(d.table == AuditEntry.__tablename__ for d in found) else ""
        if trigger:
            connection.exec_driver_sql(f"DROP TRIGGER {_KEEPS_AUDIT}")
        for d in found:
            connection.execute(text(f"DELETE FROM {d.table} WHERE rowid = :rowid"), {"rowid": d.rowid})
        if trigger:
            connection.exec_driver_sql(trigger)


def integrity(store: Store) -> list[str]:
    """The problems that SQLite's own check finds in the file; empty if there are none."""
    with store.engine.connect() as connection:
        lines = [str(line) for (line,) in connection.exec_driver_sql("PRAGMA quick_check")]
    return [line for line in lines if line != "ok"]


def _damaged(session: Session, row: type[Base], make: Callable[[Any], object]) -> Iterator[Damaged]:
    for rowid, made in _rows(session, row):
        try:
            make(made)
        except Exception as error:  # what a damaged row raises depends on the damage
            yield _damaged_row(made, rowid, reason(error))


def _rows(session: Session, row: type[Base]) -> Iterator[tuple[int, Any]]:
    query: Select[Any] = select(literal_column(f"{row.__tablename__}.rowid")).add_columns(row)
    yield from ((rowid, made) for rowid, made in session.execute(query))


def _columns(session: Session, row: type[Base], *names: str) -> Iterator[tuple[Any, ...]]:
    wanted = (literal_column(f"{row.__tablename__}.rowid"), *(getattr(row, name) for name in names))
    yield from (tuple(found) for found in session.execute(select(*wanted)))


def _damaged_row(row: Base, rowid: int, why: str) -> Damaged:
    body = {column.name: getattr(row, column.name) for column in row.__table__.columns}
    return Damaged(table=row.__tablename__, rowid=rowid, key=key_of(row), why=why, body=body)


def _trigger(connection: Connection) -> str:
    query = text("SELECT sql FROM sqlite_master WHERE type = 'trigger' AND name = :name")
    return str(connection.execute(query, {"name": _KEEPS_AUDIT}).scalar_one())


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


def _step_of(row: StepRow) -> None:
    if StepReport.model_validate_json(row.body).step != row.step:
        raise ValueError("the step number in the row differs from the step number in its report")


_READERS: Final[tuple[tuple[type[Base], Callable[[Any], object]], ...]] = (
    (TokenRow, token_of),
    (RunRow, run_of),
    (GenerationRow, generation_of),
    (AgentRow, agent_of),
    (StepRow, _step_of),
    (AlertRow, alert_of),
    (AuditEntry, audit_of),
)
