"""The store: persistent state of the daemon, in SQLite or any other database that SQLAlchemy supports.

A method has committed when it returns, so changes that the daemon acknowledges are durable.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sqlalchemy import delete, event, func, select, update
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import sessionmaker

from tidegate.daemon.decisions.generations import Generation
from tidegate.daemon.storage import alert_table
from tidegate.daemon.storage.alert_table import AlertTable, KnownAlert
from tidegate.daemon.storage.database_file import DatabaseFile, remedy
from tidegate.daemon.storage.engines import (
    WAIT_SECONDS,
    LockTimeout,
    engine_for,
    only_reads,
    read_only,
    with_lock_timeout,
)
from tidegate.daemon.storage.migrations.upgrade import upgrade
from tidegate.daemon.storage.off_loop import off_loop
from tidegate.daemon.storage.records import (
    AgentRecord,
    AuditNote,
    StoredRun,
    agent_of,
    agent_row,
    audit_entry,
    audit_of,
    generation_of,
    generation_row,
    run_of,
    run_row,
)
from tidegate.daemon.storage.row_reader import RowReader
from tidegate.daemon.storage.schema import AgentRow, AlertRow, AuditEntry, CounterRow, GenerationRow, RunRow, StepRow
from tidegate.daemon.storage.step_table import StepTable
from tidegate.daemon.storage.token_table import TokenTable
from tidegate.errors import DaemonError
from tidegate.wire.audit import AuditRow

_PROBE: Final = "readyz"
"""Name of the counter that `Store.test_write` writes."""


class Store:
    """The database at `url`. Opening it upgrades its tables; DaemonError for a database of a newer version.

    if_new: the error to raise if the database has no tables yet, before any table is created.
    """

    def __init__(self, url: str, if_new: DaemonError | None = None) -> None:
        try:
            self.lock_timeout = LockTimeout()
            self._engine = engine_for(url, "FULL", self.lock_timeout)
            self._relaxed = engine_for(url, "NORMAL", LockTimeout())
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
        self._reading = sessionmaker(read_only(self._engine))
        # The probe does not wait for the disk, so it holds the lock only briefly.
        self._probing = sessionmaker(with_lock_timeout(self._relaxed, LockTimeout(WAIT_SECONDS)))
        self.row_reader = RowReader()
        self.tokens = TokenTable(self._session, self._reading, self.row_reader)
        self.alerts = AlertTable(self._reading, self.row_reader)
        self.steps = StepTable(self._relaxed, read_only(self._relaxed))

    @property
    def engine(self) -> Engine:
        return self._engine

    def use_short_timeout(self) -> None:
        """Makes later changes wait for the write lock only for up to `WAIT_SECONDS`: a client waits for each change."""
        self.lock_timeout.seconds = WAIT_SECONDS

    def _check_file(self, connection: Connection) -> None:
        if not only_reads(connection):
            self._file.check()

    def test_write(self) -> None:
        """Writes one small row; raises SQLAlchemy's error if that fails. It blocks: do not call it on an event loop."""
        with self._probing.begin() as session:
            session.merge(CounterRow(name=_PROBE, next=int(time.time())))
        self.lock_timeout.gave_up = False  # the write lock is free again: changes may wait for it

    def close(self) -> None:
        self.thread.shutdown()
        self._engine.dispose()
        self._relaxed.dispose()

    # ---- runs and generations

    def runs(self) -> list[StoredRun]:
        """Every run that can be read, oldest first."""
        with self._reading() as session:
            return list(self.row_reader.each(session.scalars(select(RunRow).order_by(RunRow.created_at)), run_of))

    def run_names(self) -> set[str]:
        """The names of all stored runs, including runs that cannot be read."""
        with self._reading() as session:
            return set(session.scalars(select(RunRow.name)))

    @off_loop
    def add_run(self, name: str, created_at: float, first: Generation, agent: AgentRecord) -> None:
        with self._session.begin() as session:
            session.add(RunRow(name=name, created_at=created_at))
            session.merge(generation_row(name, first))
            session.merge(agent_row(agent))

    @off_loop
    def save(
        self,
        run: str,
        generations: Iterable[Generation] = (),
        notes: Iterable[AuditNote] = (),
        agents: Iterable[AgentRecord] = (),
        runs: Iterable[StoredRun] = (),
        alerts: Iterable[KnownAlert] = (),
        deleted_alerts: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Stores new and changed records of a run, and deletes alerts, in one transaction.

        notes: new rows of the audit log. deleted_alerts: run and fingerprint of each alert to delete.
        """
        with self._session.begin() as session:
            for generation in generations:
                session.merge(generation_row(run, generation))
            for agent in agents:
                session.merge(agent_row(agent))
            for stored in runs:
                session.merge(run_row(stored))
            alert_table.change(session, alerts, deleted_alerts)
            session.add_all(audit_entry(note) for note in notes)

    @off_loop
    def delete_runs(self, runs: Sequence[str], notes: Iterable[AuditNote]) -> None:
        """Deletes runs with their generations, ranks, steps and alerts in one transaction. The audit log stays."""
        with self._session.begin() as session:
            agents = select(AgentRow.agent).where(AgentRow.run.in_(runs))
            session.execute(delete(StepRow).where(StepRow.agent.in_(agents)))
            for row in (AgentRow, GenerationRow, AlertRow):
                session.execute(delete(row).where(row.run.in_(runs)))
            session.execute(delete(RunRow).where(RunRow.name.in_(runs)))
            session.add_all(audit_entry(note) for note in notes)

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
                "told": agent.last_report,
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
        """Number of the newest generation that is in one of these states and has a number smaller than `below`; None if
        there is none."""
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
