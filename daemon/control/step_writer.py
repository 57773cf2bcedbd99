"""The steps that ranks tell, on their way to the database: written together, once a second."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from tidegate.daemon.control.run import Clock, Member
from tidegate.daemon.storage.step_table import StepRecord, StepTable, step_of
from tidegate.wire.step import StepReport

WRITE_SECONDS: Final = 1.0
UNWRITTEN_KEPT: Final = 50_000
"""Steps that wait for a database which refuses them; the oldest are given up."""
STEPS_BEFORE_CLEANING: Final = 32
"""An agent's old steps go when so many new ones have come: deleting one for each would be as much work again."""
SWEEP_SECONDS: Final = 3_600.0
_AFTER_ALL: Final = 2**63 - 1
"""Above every step."""
log = logging.getLogger(__name__)


class History:
    """`keep_seconds`: steps that were told longer ago than that are deleted, whosever they are.

    A thread of its own writes: however slow the disk is, no rank waits for it.
    """

    def __init__(self, table: StepTable, keep_seconds: float, clock: Clock) -> None:
        self._table = table
        self._keep_seconds = keep_seconds
        self._clock = clock
        self._unwritten: deque[StepRecord] = deque(maxlen=UNWRITTEN_KEPT)
        self._uncleaned: dict[str, int] = {}
        self._firsts: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(1, "tidegate-history")
        self._under_way: tuple[list[StepRecord], dict[str, int], Future[None]] | None = None
        self._written_at = clock.mono()
        self._swept_at = -math.inf

    def add(self, member: Member, steps: tuple[StepReport, ...]) -> None:
        """Remembers them for the next write."""
        if not steps:
            return
        agent, at = member.hello.agent, self._clock.wall()
        self._unwritten.extend(StepRecord(agent, step.step, at, step.model_dump_json()) for step in steps)
        self._uncleaned[agent] = self._uncleaned.get(agent, 0) + len(steps)
        if self._uncleaned[agent] >= STEPS_BEFORE_CLEANING:
            self._uncleaned[agent] = 0
            self._firsts[agent] = member.window.oldest

    async def newest(self, agent: str, limit: int) -> list[str]:
        """The newest reports of an agent in JSON, oldest first; those that wait to be written are among them."""
        waiting = [*(self._under_way[0] if self._under_way is not None else ()), *self._unwritten]
        told = {step.step: step.body for step in waiting if step.agent == agent}
        rows = await asyncio.to_thread(self._table.newest, agent, limit)
        stored = {step: body for step, body in rows if step_of(agent, body)}
        found = stored | told  # what was under way may be there by now
        return [found[step] for step in sorted(found)[-limit:]]

    def tick(self, now: float) -> None:
        """To be called several times a second; `now` is on the monotonic clock. It logs what fails."""
        if self._under_way is not None and self._under_way[2].done():
            self._settle_or_tell()
        if now - self._written_at >= WRITE_SECONDS and self._under_way is None:
            self._written_at = now  # a database that refuses them is asked again in a second
            self._begin(now)

    def write(self) -> None:
        """Writes all that was told until now, and returns when it is there; raises when this try fails, too."""
        self._settle_or_tell()
        self._begin(self._clock.mono())
        self.settle()

    def settle(self) -> None:
        """Waits for the write that is under way. What it could not write waits for the next; raises why."""
        if self._under_way is None:
            return
        (steps, firsts, done), self._under_way = self._under_way, None
        if error := done.exception():
            room = UNWRITTEN_KEPT - len(self._unwritten)
            self._unwritten.extendleft(steps[: -room - 1 : -1])  # the newest of them, in their order
            self._firsts = firsts | self._firsts
            raise error

    def _settle_or_tell(self) -> None:
        try:
            self.settle()
        except Exception as error:
            log.error("steps could not be stored, %d wait for the next try: %s", len(self._unwritten), error)

    def forget(self, agent: str) -> None:
        """The agent is gone: nothing more comes of it."""
        self._uncleaned.pop(agent, None)

    def drop(self, agent: str) -> None:
        """Another has taken its rank, and nobody can ask for its steps any more: they go with the next write."""
        self.forget(agent)
        self._firsts[agent] = _AFTER_ALL

    def erase(self, agents: Collection[str]) -> None:
        """These agents are deleted: what they told and is not written yet goes, too. To be called before the rows are
        deleted, so that a write which is under way brings none of them back."""
        if self._under_way is not None and any(step.agent in agents for step in self._under_way[0]):
            self._settle_or_tell()
        left = [step for step in self._unwritten if step.agent not in agents]
        self._unwritten.clear()
        self._unwritten.extend(left)
        for agent in agents:
            self.forget(agent)
            self._firsts.pop(agent, None)

    def close(self) -> None:
        self._thread.shutdown()

    def _begin(self, now: float) -> None:
        steps, firsts = list(self._unwritten), dict(self._firsts)
        before = None
        if now - self._swept_at >= SWEEP_SECONDS:
            self._swept_at, before = now, self._clock.wall() - self._keep_seconds
        if steps or firsts or before is not None:
            self._unwritten.clear()
            self._firsts.clear()
            self._under_way = steps, firsts, self._thread.submit(self._table.write, steps, firsts.items(), before)
