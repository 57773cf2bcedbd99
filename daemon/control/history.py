"""The steps that ranks tell, on their way to the database: written together, once a second."""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

from tidegate.daemon.control.run import Clock, Member
from tidegate.daemon.steps import StepTable, ToldStep
from tidegate.wire import StepReport

WRITE_SECONDS: Final = 1.0
UNWRITTEN_KEPT: Final = 50_000
"""Steps that wait for a database which refuses them; the oldest are given up."""
STEPS_BEFORE_CLEANING: Final = 32
"""An agent's old steps go when so many new ones have come: deleting one for each would be as much work again."""
SWEEP_SECONDS: Final = 3_600.0
log = logging.getLogger(__name__)


class History:
    """`keep_seconds`: steps that were told longer ago than that are deleted, whosever they are."""

    def __init__(self, table: StepTable, keep_seconds: float, clock: Clock) -> None:
        self._table = table
        self._keep_seconds = keep_seconds
        self._clock = clock
        self._unwritten: deque[ToldStep] = deque(maxlen=UNWRITTEN_KEPT)
        self._uncleaned: dict[str, int] = {}
        self._firsts: dict[str, int] = {}
        self._written_at = clock.mono()
        self._swept_at = -SWEEP_SECONDS

    def add(self, member: Member, steps: tuple[StepReport, ...]) -> None:
        """Remembers them for the next write."""
        if not steps:
            return
        agent, at = member.hello.agent, self._clock.wall()
        self._unwritten.extend(ToldStep(agent, step.step, at, step.model_dump_json()) for step in steps)
        self._uncleaned[agent] = self._uncleaned.get(agent, 0) + len(steps)
        if self._uncleaned[agent] >= STEPS_BEFORE_CLEANING:
            self._uncleaned[agent] = 0
            self._firsts[agent] = member.window.oldest

    def newest(self, agent: str, limit: int) -> list[str]:
        """The newest reports of an agent in JSON, oldest first; those that wait to be written are among them."""
        told = [step.body for step in self._unwritten if step.agent == agent]
        return [*self._table.newest(agent, limit), *told][-limit:]

    def tick(self, now: float) -> None:
        """To be called several times a second; `now` is on the monotonic clock."""
        if now - self._written_at >= WRITE_SECONDS:
            self._written_at = now  # a database that refuses them is asked again in a second
            self.write()
        if now - self._swept_at >= SWEEP_SECONDS:
            self._swept_at = now
            if gone := self._table.forget_before(self._clock.wall() - self._keep_seconds):
                log.info("%d steps are older than %g days: deleted", gone, self._keep_seconds / 86_400)

    def write(self) -> None:
        """Writes what was told since the last time."""
        if self._unwritten or self._firsts:
            self._table.write(self._unwritten, self._firsts.items())
            self._unwritten.clear()
            self._firsts.clear()

    def forget(self, agent: str) -> None:
        """The agent is gone: nothing more comes of it."""
        self._uncleaned.pop(agent, None)
