"""The stored steps of ranks: the newest of each agent, as it told them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import bindparam, delete, func, insert, select
from sqlalchemy.engine import Engine

from tidegate.daemon.schema import StepRow


@dataclass(frozen=True, slots=True)
class ToldStep:
    """One step of an agent. `body`: its report in JSON; `at`: seconds since the epoch."""

    agent: str
    step: int
    at: float
    body: str


_INSERT: Final = insert(StepRow)
_OLDER: Final = delete(StepRow).where(StepRow.agent == bindparam("of"), StepRow.step < bindparam("first"))


class StepTable:
    """The steps of one database. Every method has committed when it returns. For any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def write(
        self, steps: Iterable[ToldStep], firsts: Iterable[tuple[str, int]] = (), before: float | None = None
    ) -> None:
        """All of these in one transaction. Of the agents in `firsts`, what is before that step goes; of all, what was
        told before the time `before`."""
        rows = [{"agent": s.agent, "step": s.step, "at": s.at, "body": s.body} for s in steps]
        old = [{"of": agent, "first": first} for agent, first in firsts]
        with self._engine.begin() as connection:
            if rows:
                connection.execute(_INSERT, rows)
            if old:
                connection.execute(_OLDER, old)
            if before is not None:
                connection.execute(delete(StepRow).where(StepRow.at < before))

    def newest(self, agent: str, limit: int) -> list[tuple[int, str]]:
        """The newest `limit` steps of the agent, each with its report in JSON, oldest first."""
        query = select(StepRow.step, StepRow.body).where(StepRow.agent == agent)
        with self._engine.connect() as connection:
            rows = connection.execute(query.order_by(StepRow.step.desc()).limit(limit)).all()
            return [(step, body) for step, body in reversed(rows)]

    def newest_numbers(self) -> dict[str, int]:
        """The newest step of every agent."""
        query = select(StepRow.agent, func.max(StepRow.step)).group_by(StepRow.agent)
        with self._engine.connect() as connection:
            return {agent: newest for agent, newest in connection.execute(query)}  # noqa: C416
