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
_NEWER: Final = delete(StepRow).where(StepRow.agent == bindparam("of"), StepRow.step >= bindparam("first"))
_OLDER: Final = delete(StepRow).where(StepRow.agent == bindparam("of"), StepRow.step < bindparam("first"))


class StepTable:
    """The steps of one database. Every method has committed when it returns. For any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def write(
        self, steps: Iterable[ToldStep], firsts: Iterable[tuple[str, int]] = (), before: float | None = None
    ) -> None:
        """All of these, oldest first, in one transaction; writing them again is fine.

        firsts: agents, and the step before which what they told goes. before: a time; all that was told earlier goes.
        """
        rows = list(steps)
        old = [{"of": agent, "first": first} for agent, first in firsts]
        with self._engine.begin() as connection:
            if rows:
                begin = {s.agent: s.step for s in reversed(rows)}
                connection.execute(_NEWER, [{"of": agent, "first": step} for agent, step in begin.items()])
                connection.execute(_INSERT, [{name: getattr(s, name) for name in ToldStep.__slots__} for s in rows])
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
