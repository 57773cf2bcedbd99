"""Write buffer for reported steps: a background thread writes them to the database once a second."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from tidegate.daemon.control.run import Clocks, Member
from tidegate.daemon.storage.step_table import StepRecord, StepTable, step_of
from tidegate.wire.step import StepReport

WRITE_SECONDS: Final = 1.0
"""Seconds between two writes of the buffered steps to the database."""
UNWRITTEN_KEPT: Final = 50_000
"""Maximum number of steps in the buffer. They accumulate while writes to the database fail. Above the maximum the
oldest steps are dropped."""
STEPS_BEFORE_CLEANING: Final = 32
"""Number of new steps of an agent after which its old steps are deleted. To delete one old step with each new step
would double the work."""
SWEEP_SECONDS: Final = 3_600.0
"""Maximum time in seconds between two deletions of the steps that are older than `keep_seconds`. If `keep_seconds` is
shorter, the deletions are `keep_seconds` apart, but at least SHORTEST_SWEEP_SECONDS."""
SHORTEST_SWEEP_SECONDS: Final = 60.0
"""Minimum time in seconds between two deletions of old steps, because each deletion examines the last step of every
agent that has ended."""
_AFTER_ALL: Final = 2**63 - 1
"""A number larger than every step number. The steps of an agent below a given number are deleted; with this number all
its steps are deleted."""
log = logging.getLogger(__name__)


class StepWriter:
    """Buffers reported steps and writes them in a thread, so that no rank waits for a slow disk.

    keep_seconds: steps of any agent that were reported longer ago are not served any more, and deleted. The last step
    of each agent stays.
    """

    def __init__(self, table: StepTable, keep_seconds: float, clock: Clocks) -> None:
        self._table = table
        self._keep_seconds = keep_seconds
        self._sweep_seconds = min(SWEEP_SECONDS, max(SHORTEST_SWEEP_SECONDS, keep_seconds))
        self._clock = clock
        self._unwritten: deque[StepRecord] = deque(maxlen=UNWRITTEN_KEPT)
        self._uncleaned: dict[str, int] = {}
        self._firsts: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(1, "tidegate-history")
        self._running: tuple[list[StepRecord], dict[str, int], Future[None]] | None = None
        self._written_at = clock.mono()
        self._swept_at = -math.inf

    def add(self, member: Member, steps: tuple[StepReport, ...]) -> None:
        """Adds steps to the buffer for the next write."""
        if not steps:
            return
        agent, at = member.hello.agent, self._clock.wall()
        self._unwritten.extend(StepRecord(agent, step.step, at, step.model_dump_json()) for step in steps)
        self._uncleaned[agent] = self._uncleaned.get(agent, 0) + len(steps)
        if self._uncleaned[agent] >= STEPS_BEFORE_CLEANING:
            self._uncleaned[agent] = 0
            self._firsts[agent] = member.window.oldest

    async def newest(self, agent: str, limit: int) -> list[str]:
        """The newest reports of an agent in JSON, oldest first, including reports that are not written yet.

        If all are older than `keep_seconds`, only the last one.
        """
        since = self._clock.wall() - self._keep_seconds
        return await self._since(agent, limit, since) or await self._since(agent, 1, -math.inf)

    async def _since(self, agent: str, limit: int, since: float) -> list[str]:
        """The newest reports of an agent that were received at the time `since` or later."""
        waiting = [*(self._running[0] if self._running is not None else ()), *self._unwritten]
        buffered = {step.step: step.body for step in waiting if step.agent == agent and step.at >= since}
        rows = await asyncio.to_thread(self._table.newest, agent, limit, since)
        stored = {step: body for step, body in rows if step_of(agent, body)}
        bodies = stored | buffered  # a step may be in both, if the running write has finished meanwhile
        return [bodies[step] for step in sorted(bodies)[-limit:]]

    def tick(self, now: float) -> None:
        """Starts a write when it is time; logs a failed write. `now` is on the monotonic clock. Call it several times a
        second."""
        if self._running is not None and self._running[2].done():
            self._wait_or_log()
        if now - self._written_at >= WRITE_SECONDS and self._running is None:
            self._written_at = now  # if the database refuses the steps, the next try is after `WRITE_SECONDS`
            self._begin(now)

    def write(self) -> None:
        """Writes all buffered steps and returns when they are stored; raises if this try fails."""
        self._wait_or_log()
        self._begin(self._clock.mono())
        self.wait_for_write()

    def wait_for_write(self) -> None:
        """Waits for the running write. If it failed, puts its steps back into the buffer and raises its error."""
        if self._running is None:
            return
        (steps, firsts, done), self._running = self._running, None
        if error := done.exception():
            room = UNWRITTEN_KEPT - len(self._unwritten)
            self._unwritten.extendleft(steps[: -room - 1 : -1])  # the newest steps that fit, in their order
            self._firsts = firsts | self._firsts
            raise error

    def _wait_or_log(self) -> None:
        try:
            self.wait_for_write()
        except Exception as error:
            log.error(
                "steps could not be written to the database, %d are kept in memory: %s", len(self._unwritten), error
            )

    def forget(self, agent: str) -> None:
        """Drops the count of new steps of an agent that has ended. The count decides when old steps are deleted."""
        self._uncleaned.pop(agent, None)

    def drop(self, agent: str) -> None:
        """Deletes the steps of a replaced agent with the next write: its rank has another agent now, so no request can
        read them."""
        self.forget(agent)
        self._firsts[agent] = _AFTER_ALL

    def erase(self, agents: Collection[str]) -> None:
        """Removes steps of deleted agents from the buffer.

        Call it before the rows are deleted: it waits for a running write, which could otherwise store them again.
        """
        if self._running is not None and any(step.agent in agents for step in self._running[0]):
            self._wait_or_log()
        remaining = [step for step in self._unwritten if step.agent not in agents]
        self._unwritten.clear()
        self._unwritten.extend(remaining)
        for agent in agents:
            self.forget(agent)
            self._firsts.pop(agent, None)

    def close(self) -> None:
        self._thread.shutdown()

    def _begin(self, now: float) -> None:
        steps, firsts = list(self._unwritten), dict(self._firsts)
        before = None
        if now - self._swept_at >= self._sweep_seconds:
            self._swept_at, before = now, self._clock.wall() - self._keep_seconds
        if steps or firsts or before is not None:
            self._unwritten.clear()
            self._firsts.clear()
            self._running = steps, firsts, self._thread.submit(self._table.write, steps, firsts.items(), before)
