"""The store: persistent state of the daemon, in SQLite or any other database that SQLAlchemy supports.

A method has committed when it returns, so changes that the daemon acknowledges are durable.
"""

from __future__ import annotations

import functools
import sqlite3
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from pydantic import Field, TypeAdapter
from sqlalchemy import create_engine, delete, event, func, select, update
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.orm import sessionmaker

from tidegate.daemon.decisions import canary
from tidegate.daemon.decisions.generations import Ballot, Generation
from tidegate.daemon.storage import alert_table
from tidegate.daemon.storage.alert_table import AlertTable, KnownAlert
from tidegate.daemon.storage.database_file import DatabaseFile, remedy
from tidegate.daemon.storage.migrations.upgrade import upgrade
from tidegate.daemon.storage.off_loop import off_loop
from tidegate.daemon.storage.row_reader import RowReader, json_of, text_of
from tidegate.daemon.storage.schema import AgentRow, AlertRow, AuditEntry, CounterRow, GenerationRow, RunRow, StepRow
from tidegate.daemon.storage.step_table import StepTable
from tidegate.daemon.storage.token_table import TokenTable
from tidegate.errors import DaemonError
from tidegate.knobs.knobs import Knobs
from tidegate.wire.agent import AgentHello, Rates
from tidegate.wire.audit import AuditRow
from tidegate.wire.base import Duration, Finite, KnobChanges, Label, Liveness, Message, RunName
from tidegate.wire.knobs import MeasuredEffect

BUSY_SECONDS: Final = 5.0
"""Longest wait for the write lock that another process holds, while the daemon starts and in other programs."""
WAIT_SECONDS: Final = 1.0
"""Longest wait for that lock in a daemon that serves requests."""
_ONLY_READS: Final = "tidegate_only_reads"
_LOCK_TIMEOUT: Final = "tidegate_lock_timeout"
_PROBE: Final = "readyz"
"""Name of the counter that `Store.test_write` writes."""


@dataclass(frozen=True, kw_only=True)
class AgentRecord:
    """The agent of one rank as it is stored."""

    hello: AgentHello
    liveness: Liveness
    last_seen: float
    step: int
    applied_generation: int
    told: dict[str, Any]
    owner: str = ""
    """Id of the token that the agent used; empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class AuditNote:
    """A new row of the audit log, which has no number yet."""

    timestamp: float
    actor: str
    action: str
    run: str
    generation: int | None = None
    before: KnobChanges | None = None
    after: KnobChanges | None = None
    reason: str = ""
    effect: str = ""


class LastReport(Message):
    """`Member.last_report` as it is stored."""

    phase: Label = "other"
    effective: KnobChanges = Field(default_factory=dict)
    predicted_update_seconds: Duration | None = None
    rates: Rates | None = None


class StoredRun(Message):
    """A row of the table of runs."""

    name: RunName
    created_at: Finite


_AGENT: Final = TypeAdapter(AgentRecord)
_GENERATION: Final = TypeAdapter(Generation)


@dataclass(slots=True)
class LockTimeout:
    """How long a write transaction waits for the write lock while another process holds it."""

    seconds: float = BUSY_SECONDS
    gave_up: bool = False
    """A transaction has waited without success. The next ones do not wait, until one has obtained the lock."""
    at_once: bool = False
    """The next transaction does not wait."""


class Store:
    """The database at `url`. Opening it upgrades its tables; DaemonError for a database of a newer version.

    if_new: the error to raise if the database has no tables yet, before any table is created.
    """

    def __init__(self, url: str, if_new: DaemonError | None = None) -> None:
        try:
            self.lock_timeout = LockTimeout()
            self._engine, self._relaxed = _engine(url, "FULL", self.lock_timeout), _engine(url, "NORMAL", LockTimeout())
            self._file = DatabaseFile(self._engine.url.database if self._engine.dialect.name == "sqlite" else None)
            upgrade(self._engine, if_new)
            self._file.remember()
            for engine in (self._engine, self._relaxed):
                event.listen(engine, "do_connect", lambda *_: self._file.check())
                event.listen(engine, "begin", self._check_file, insert=True)
        except (SQLAlchemyError, ImportError) as error:
            why = str(getattr(error, "orig", None) or error).splitlines()[0]
            what_to_do = remedy(error)
            shown = url if "@" not in url else url.partition("://")[0]
            raise DaemonError(
                f"The database {shown} cannot be opened: {why}{f'; {what_to_do}' if what_to_do else ''}."
            ) from error
        self.thread = ThreadPoolExecutor(1, "tidegate-store")
        self._session = sessionmaker(self._engine, expire_on_commit=False)
        self._reading = sessionmaker(_reading(self._engine))
        probing = self._relaxed.execution_options(**{_LOCK_TIMEOUT: LockTimeout(WAIT_SECONDS)})
        self._probing = sessionmaker(probing)  # does not wait for the disk, so it holds the lock only briefly
        self.row_reader = RowReader()
        self.tokens = TokenTable(self._session, self._reading, self.row_reader)
        self.alerts = AlertTable(self._reading, self.row_reader)
        self.steps = StepTable(self._relaxed, _reading(self._relaxed))

    @property
    def engine(self) -> Engine:
        return self._engine

    def use_short_timeout(self) -> None:
        """From now on a change waits for the write lock for `WAIT_SECONDS` at most, because a client waits for it."""
        self.lock_timeout.seconds = WAIT_SECONDS

    def _check_file(self, connection: Connection) -> None:
        if not _only_reads(connection):
            self._file.check()

    def test_write(self) -> None:
        """Writes one small row; raises SQLAlchemy's error if that fails. It may block: not for an event loop."""
        with self._probing.begin() as session:
            session.merge(CounterRow(name=_PROBE, next=int(time.time())))
        self.lock_timeout.gave_up = False  # the write lock is free again: changes may wait for it

    def close(self) -> None:
        self.thread.shutdown()
        self._engine.dispose()
        self._relaxed.dispose()

    # ---- runs and generations

    def runs(self) -> dict[str, float]:
        """Every run that can be read, with its time of creation in seconds since the epoch."""
        with self._reading() as session:
            rows = session.scalars(select(RunRow).order_by(RunRow.created_at))
            return dict(self.row_reader.each(rows, run_of))

    def run_names(self) -> set[str]:
        """The names of all stored runs, including runs that cannot be read."""
        with self._reading() as session:
            return set(session.scalars(select(RunRow.name)))

    @off_loop
    def add_run(self, name: str, created_at: float, first: Generation, agent: AgentRecord) -> None:
        with self._session.begin() as session:
            session.add(RunRow(name=name, created_at=created_at))
            session.merge(_generation_row(name, first))
            session.merge(_agent_row(agent))

    @off_loop
    def save(
        self,
        run: str,
        generations: Iterable[Generation] = (),
        notes: Iterable[AuditNote] = (),
        agents: Iterable[AgentRecord] = (),
        alerts: Iterable[KnownAlert] = (),
        deleted_alerts: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Stores all of these in one transaction. deleted_alerts: run and fingerprint of alerts to delete."""
        with self._session.begin() as session:
            for generation in generations:
                session.merge(_generation_row(run, generation))
            for agent in agents:
                session.merge(_agent_row(agent))
            alert_table.change(session, alerts, deleted_alerts)
            session.add_all(_audit_entry(note) for note in notes)

    @off_loop
    def delete_runs(self, runs: Sequence[str], notes: Iterable[AuditNote]) -> None:
        """Deletes runs with their generations, ranks, steps and alerts in one transaction. The audit log stays."""
        with self._session.begin() as session:
            agents = select(AgentRow.agent).where(AgentRow.run.in_(runs))
            session.execute(delete(StepRow).where(StepRow.agent.in_(agents)))
            session.execute(delete(AgentRow).where(AgentRow.run.in_(runs)))
            session.execute(delete(GenerationRow).where(GenerationRow.run.in_(runs)))
            session.execute(delete(AlertRow).where(AlertRow.run.in_(runs)))
            session.execute(delete(RunRow).where(RunRow.name.in_(runs)))
            session.add_all(_audit_entry(note) for note in notes)

    @off_loop
    def update_agents(self, agents: Iterable[AgentRecord]) -> None:
        """Updates the frequently changing columns of stored agents, in one statement."""
        rows = [
            {
                "run": agent.hello.run,
                "rank": agent.hello.rank,
                "liveness": agent.liveness,
                "last_seen": agent.last_seen,
                "step": agent.step,
                "applied_generation": agent.applied_generation,
                "told": agent.told,
            }
            for agent in agents
        ]
        if rows:
            with self._session.begin() as session:
                session.execute(update(AgentRow), rows)

    def generations(self, run: str) -> list[Generation]:
        """All generations of the run, oldest first."""
        query = select(GenerationRow).where(GenerationRow.run == run).order_by(GenerationRow.number)
        with self._reading() as session:
            return list(self.row_reader.each(session.scalars(query), generation_of))

    def newest_number(self, run: str) -> int:
        """The largest number among the run's unreadable generations; -1 if there are none.

        The number is in use: a new generation must not overwrite an unreadable row that is kept.
        """
        left_out = self.row_reader.unreadable.get(GenerationRow.__tablename__, ())
        return max((key[1] for key in left_out if key[0] == run and isinstance(key[1], int)), default=-1)

    @off_loop
    def newest_of(self, run: str, states: Collection[str], below: int) -> int | None:
        """The number of the newest generation below `below` that is in one of these states."""
        query = select(func.max(GenerationRow.number)).where(
            GenerationRow.run == run, GenerationRow.number < below, GenerationRow.state.in_(states)
        )
        with self._reading() as session:
            return session.scalar(query)

    @off_loop
    def generation(self, run: str, number: int) -> Generation | None:
        """One generation; None if it is not stored, cannot be read, or was moved to the quarantine table."""
        with self._reading() as session:
            row = session.get(GenerationRow, (run, number))
            return next(self.row_reader.each([row] if row is not None else [], generation_of), None)

    # ---- counters

    @off_loop
    def reserve(self, counter: str, count: int) -> int:
        """Reserves `count` numbers of a counter and returns the first.

        A new counter starts at the milliseconds since the epoch. Earlier versions had no counter and made their numbers
        from the clock, so all their numbers are smaller.
        """
        with self._session.begin() as session:
            row = session.get(CounterRow, counter)
            if row is None:
                session.add(row := CounterRow(name=counter, next=int(time.time() * 1000)))
            first = row.next
            row.next = first + count
            return first

    # ---- agents and audit

    def agents(self) -> list[AgentRecord]:
        with self._reading() as session:
            return list(self.row_reader.each(session.scalars(select(AgentRow)), agent_of))

    def audit(self, run: str | None, limit: int) -> list[AuditRow]:
        """The newest `limit` audit rows of the run, or of the whole log for run None, oldest first."""
        query = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(limit)
        if run is not None:
            query = query.where(AuditEntry.run == run)
        with self._reading() as session:
            return list(self.row_reader.each(session.scalars(query), audit_of))[::-1]


def is_busy(error: OperationalError) -> bool:
    """Whether another process holds SQLite's write lock."""
    return isinstance(error.orig, sqlite3.OperationalError) and "is locked" in str(error.orig)


def _engine(url: str, synchronous: Literal["FULL", "NORMAL"], timeout: LockTimeout) -> Engine:
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


def _reading(engine: Engine) -> Engine:
    """The same engine with an option that marks its transactions as read-only."""
    return engine.execution_options(**{_ONLY_READS: True})


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


def _change_to_wal(connection: sqlite3.Connection) -> None:
    """Changes the database to WAL mode. SQLite itself does not wait for another process that does the same."""
    latest = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > latest:
                raise
            time.sleep(0.01)


def _begin(timeout: LockTimeout, connection: Connection) -> None:
    """Begins a transaction: BEGIN IMMEDIATE for one that may write, so that concurrent writers wait for each other.

    With a plain BEGIN, a transaction that reads first could fail to write later. A transaction that only reads begins
    with a plain BEGIN, and does not wait for writers.
    """
    if _only_reads(connection):
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


def _only_reads(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get(_ONLY_READS))


def _generation_row(run: str, g: Generation) -> GenerationRow:
    return GenerationRow(
        run=run,
        number=g.number,
        state=g.state,
        knobs=dict(g.knobs),
        changes=dict(g.changes),
        author=g.author,
        reason=g.reason,
        created_at=g.created_at,
        decided_at=g.decided_at,
        outcome=g.outcome,
        votes={str(rank): [ballot.can, ballot.reason] for rank, ballot in g.votes.items()},
        applied={str(rank): step for rank, step in g.applied.items()},
        effect=g.effect.model_dump() if g.effect else None,
        canary=dict(canary.as_json(g.canary)) if g.canary else None,
        restores=g.restores,
    )


def run_of(row: RunRow) -> tuple[str, float]:
    """Name and time of creation of a run. Each function `…_of(row)` raises for a row that cannot be read."""
    run = StoredRun(name=row.name, created_at=row.created_at)
    return run.name, run.created_at


def audit_of(row: AuditEntry) -> AuditRow:
    return AuditRow(**{name: getattr(row, name) for name in AuditRow.model_fields})


def agent_of(row: AgentRow) -> AgentRecord:
    hello = AgentHello.model_validate(row.hello)
    if (hello.run, hello.rank, hello.agent) != (row.run, row.rank, row.agent):
        raise ValueError("its hello message is that of another rank")
    told = LastReport.model_validate(row.told or {}).model_dump(exclude_unset=True)
    more = {name: getattr(row, name) for name in ("liveness", "last_seen", "step", "applied_generation")}
    return _AGENT.validate_python({"hello": hello, "told": told, "owner": row.owner or "", **more})


def generation_of(row: GenerationRow) -> Generation:
    generation = _GENERATION.validate_python(asdict(_generation(row)))
    Knobs(**generation.knobs)  # type: ignore[arg-type]  # raises for invalid knobs
    return generation


def _generation(row: GenerationRow) -> Generation:
    return Generation(
        number=row.number,
        state=row.state,  # type: ignore[arg-type]
        knobs=row.knobs,
        changes=row.changes,
        author=row.author,
        reason=row.reason,
        created_at=row.created_at,
        decided_at=row.decided_at,
        outcome=row.outcome,
        votes={int(rank): Ballot(*ballot) for rank, ballot in row.votes.items()},
        applied={int(rank): step for rank, step in row.applied.items()},
        effect=MeasuredEffect.model_validate(row.effect) if row.effect else None,
        canary=canary.from_json(row.canary) if row.canary else None,
        restores=row.restores,
    )


def _agent_row(agent: AgentRecord) -> AgentRow:
    return AgentRow(
        run=agent.hello.run,
        rank=agent.hello.rank,
        agent=agent.hello.agent,
        hello=agent.hello.model_dump(mode="json"),
        liveness=agent.liveness,
        last_seen=agent.last_seen,
        step=agent.step,
        applied_generation=agent.applied_generation,
        told=agent.told,
        owner=agent.owner,
    )


def _audit_entry(note: AuditNote) -> AuditEntry:
    return AuditEntry(
        timestamp=note.timestamp,
        actor=note.actor,
        action=note.action,
        run=note.run,
        generation=note.generation,
        before=note.before or {},
        after=note.after or {},
        reason=note.reason,
        effect=note.effect,
    )
