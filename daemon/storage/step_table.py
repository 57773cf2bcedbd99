"""Table of steps: the newest step reports of each agent."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import bindparam, delete, func, insert, select
from sqlalchemy.engine import Engine
from sqlalchemy.orm import aliased

from tidegate.daemon.storage.row_reader import REMEDY, reason
from tidegate.daemon.storage.schema import StepRow
from tidegate.wire.stall_causes import with_present_names
from tidegate.wire.step import StepReport


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an agent as it is stored. `body`: its report in JSON; `at`: seconds since the epoch."""

    agent: str
    step: int
    at: float
    body: str


log = logging.getLogger(__name__)
ROWS_AT_ONCE: Final = 2_000
"""Largest number of steps that are written in one transaction."""
AGENTS_AT_ONCE: Final = 500
"""Largest number of agents in one query, because databases limit the number of parameters of a query."""
PAUSE_SECONDS: Final = 0.05
"""Pause between two transactions, in seconds. Another process that waits for SQLite's write lock tries to get it only
from time to time, and would hardly get it without this pause."""
_INSERT: Final = insert(StepRow)
_NEWER: Final = delete(StepRow).where(StepRow.agent == bindparam("of"), StepRow.step >= bindparam("first"))
_LATER: Final = aliased(StepRow)
_LAST: Final = select(func.max(_LATER.step)).where(_LATER.agent == StepRow.agent).scalar_subquery()
_OLD: Final = delete(StepRow).where(StepRow.at < bindparam("before"), StepRow.step < _LAST)
_OLDER: Final = delete(StepRow).where(StepRow.agent == bindparam("of"), StepRow.step < bindparam("first"))


def step_of(agent: str, body: str) -> StepReport | None:
    """The step report in JSON text `body`; None, and one line in the log, if it cannot be read."""
    try:
        return StepReport.model_validate_json(body)
    except ValueError as error:
        _log_unreadable(agent, reason(error))
        return None


@functools.lru_cache(maxsize=1_024)  # logs each agent and reason once
def _log_unreadable(agent: str, why: str) -> None:
    log.error("steps of agent %s cannot be read and are ignored (%s): %s", agent, why, REMEDY)


class StepTable:
    """The steps in one database. Every method has committed when it returns. Safe for several threads."""

    def __init__(self, engine: Engine, reading: Engine) -> None:
        """`reading`: engine for transactions that only read."""
        self._engine, self._reading = engine, reading

    def write(
        self, steps: Iterable[StepRecord], firsts: Iterable[tuple[str, int]] = (), before: float | None = None
    ) -> None:
        """Writes these steps, given oldest first, and deletes old steps. Idempotent.

        An agent's first given step and all later steps replace its stored steps from that number on. Each transaction
        writes at most `ROWS_AT_ONCE` steps, so that other writers need not wait long if many steps are given.
        firsts: pairs of an agent and a step; the agent's steps before that step are deleted. before: a time in seconds
        since the epoch; steps stored earlier are deleted, except for the last step of each agent.
        """
        rows = list(steps)
        old = [{"of": agent, "first": first} for agent, first in firsts]
        for start in range(0, len(rows), ROWS_AT_ONCE):
            if start:
                time.sleep(PAUSE_SECONDS)
            self._write(rows[start : start + ROWS_AT_ONCE])
        if not old and before is None:
            return
        with self._engine.begin() as connection:
            if old:
                connection.execute(_OLDER, old)
            if before is not None:
                connection.execute(_OLD, {"before": before})

    def _write(self, rows: Sequence[StepRecord]) -> None:
        begin = {s.agent: s.step for s in reversed(rows)}
        with self._engine.begin() as connection:
            connection.execute(_NEWER, [{"of": agent, "first": step} for agent, step in begin.items()])
            connection.execute(_INSERT, [{name: getattr(s, name) for name in StepRecord.__slots__} for s in rows])

    def newest(self, agent: str, limit: int, since: float = -math.inf) -> list[tuple[int, str]]:
        """The newest `limit` steps of the agent, each with its report in JSON, oldest first.

        since: only steps received at this time or later, in seconds since the epoch.
        """
        query = select(StepRow.step, StepRow.body).where(StepRow.agent == agent)
        if since > -math.inf:
            query = query.where(StepRow.at >= since)
        with self._reading.connect() as connection:
            rows = connection.execute(query.order_by(StepRow.step.desc()).limit(limit)).all()
            return [(step, with_present_names(body)) for step, body in reversed(rows)]

    def last(self, agents: Sequence[str]) -> dict[str, str]:
        """The newest report of each of these agents, in JSON, by agent."""
        bodies: dict[str, str] = {}
        for start in range(0, len(agents), AGENTS_AT_ONCE):
            newest = (
                select(StepRow.agent, func.max(StepRow.step).label("step"))
                .where(StepRow.agent.in_(agents[start : start + AGENTS_AT_ONCE]))
                .group_by(StepRow.agent)
                .subquery()
            )
            same = (StepRow.agent == newest.c.agent) & (StepRow.step == newest.c.step)
            with self._reading.connect() as connection:
                rows = connection.execute(select(StepRow.agent, StepRow.body).join(newest, same))
                bodies.update((agent, with_present_names(body)) for agent, body in rows)
        return bodies

    def newest_numbers(self) -> dict[str, int]:
        """The number of the newest step of every agent."""
        query = select(StepRow.agent, func.max(StepRow.step)).group_by(StepRow.agent)
        with self._reading.connect() as connection:
            return {agent: newest for agent, newest in connection.execute(query)}  # noqa: C416
