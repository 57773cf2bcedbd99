"""One run as the daemon sees it now: its control, its ranks, its newest events. Lives in memory, bounded."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from tidegate.daemon.control.kept_steps import memory_of
from tidegate.daemon.control.liveness import liveness
from tidegate.daemon.control.timelines import Timelines
from tidegate.daemon.decisions.generations import Control, Generation
from tidegate.daemon.decisions.step_window import Figures, Window
from tidegate.wire.agent import AgentHello, AgentReport, Rates
from tidegate.wire.base import KnobChanges, Liveness
from tidegate.wire.event import Event
from tidegate.wire.step import StepReport

RECENT_STEPS: Final = 20
"""Of each rank, as they were told; of those before only the figures are in memory."""
EVENTS_KEPT: Final = 1_000
WOKEN_AT_ONCE: Final = 16
BETWEEN_SECONDS: Final = 0.008
"""Until the next few are woken: about what the answers of so many take."""


@dataclass(frozen=True, slots=True)
class Clock:
    """`wall` is seconds since the epoch, for people; `mono` never jumps, for leases and deadlines."""

    wall: Callable[[], float] = time.time
    mono: Callable[[], float] = time.monotonic


class Bell:
    """Wakes everyone who waits for a change, a few at a time: of hundreds of ranks that answer at once each would keep
    all others waiting, and reports with them."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], str] = {}
        """In the order in which they came, each with who it is."""
        self._ringing: deque[asyncio.Future[None]] = deque()

    def ring(self) -> None:
        if self._waiting:
            idle = not self._ringing
            self._ringing.extend(self._waiting)
            self._waiting.clear()
            if idle:
                self._wake()

    def call(self, who: str) -> None:
        """Wakes one of those who wait."""
        for woken in [woken for woken, name in self._waiting.items() if name == who]:
            _set(woken)

    async def wait(self, seconds: float, who: str = "") -> None:
        """Until the next ring has come round to this one, somebody calls it, or `seconds`."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        self._waiting[woken] = who
        late = loop.call_later(seconds, _set, woken)
        try:
            await woken
        finally:
            late.cancel()
            self._waiting.pop(woken, None)

    def _wake(self) -> None:
        for _ in range(min(WOKEN_AT_ONCE, len(self._ringing))):
            _set(self._ringing.popleft())
        if self._ringing:
            asyncio.get_running_loop().call_later(BETWEEN_SECONDS, self._wake)


def _set(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


@dataclass
class Member:
    """The agent that holds a rank."""

    hello: AgentHello
    seen: float
    """On the monotonic clock; -inf when it was lost before the daemon started."""
    last_seen: float
    owner: str = ""
    """Id of the token that it came with."""
    finished: bool = False
    announced: Liveness = "live"
    """What the audit log and the events know of its liveness."""
    step: int = 0
    said_at: float = -math.inf
    """When it made its newest report, by its own clock."""
    phase: str = "other"
    applied_generation: int = 0
    reported_generation: int = -1
    applied: dict[int, int] = field(default_factory=dict)
    """This agent's first step with each generation."""
    effective: KnobChanges = field(default_factory=dict)
    rates: Rates | None = None
    predicted_update_seconds: float | None = None
    timelines: Timelines = field(default_factory=Timelines)
    recent: deque[StepReport] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    recent_bytes: int = 0
    """Of memory, about; `keep` and `add` are the only ways to `recent`."""
    window: Window = field(default_factory=Window)

    def liveness(self, now: float, lease_seconds: float) -> Liveness:
        if self.finished:
            return "finished"
        return "lost" if self.seen == -math.inf else liveness(now - self.seen, lease_seconds)

    def take(self, report: AgentReport) -> tuple[StepReport, ...]:
        """Remembers what the rank says. The steps that are news: it may tell one twice."""
        self.said_at = report.timestamp
        self.step = report.step
        self.phase = report.phase
        self.effective = report.effective
        self.applied_generation = max(self.applied_generation, report.generation)
        self.rates = report.rates or self.rates
        if report.timeline is not None:
            self.timelines.take(report.timeline)
        self.predicted_update_seconds = report.predicted_update_seconds
        return tuple(step for step in sorted(report.steps, key=lambda step: step.step) if self.add(step))

    def add(self, step: StepReport) -> bool:
        """Remembers a step; whether it is newer than all before."""
        if step.step <= self.window.newest:
            return False
        self.window.add(Figures.of(step))
        if len(self.recent) == RECENT_STEPS:
            self.recent_bytes -= memory_of(self.recent[0])
        self.recent.append(step)
        self.recent_bytes += memory_of(step)
        return True

    def is_past(self, report: AgentReport) -> bool:
        """Whether the report is older than one that was taken, by its clock and by its step.

        Either alone happens to honest ranks: clocks are set back, training goes back to a checkpoint.
        """
        return report.timestamp < self.said_at and report.step < self.step

    @property
    def told(self) -> dict[str, Any]:
        """What it said last that is in no step, to be stored."""
        return {
            "phase": self.phase,
            "effective": dict(self.effective),
            "predicted_update_seconds": self.predicted_update_seconds,
            "rates": self.rates.model_dump(exclude_unset=True) if self.rates else None,
        }

    def remember(self, told: dict[str, Any]) -> None:
        """Takes what was stored."""
        self.phase = told.get("phase", self.phase)
        self.effective = told.get("effective", {})
        self.predicted_update_seconds = told.get("predicted_update_seconds")
        self.rates = Rates.model_validate(told["rates"]) if told.get("rates") else None

    def keep(self, steps: Iterable[StepReport]) -> None:
        """These are its recent steps from now on, oldest first."""
        self.recent.clear()
        self.recent.extend(steps)
        self.recent_bytes = sum(map(memory_of, self.recent))

    def forget(self) -> None:
        """Drops what is large; the last step stays."""
        self.window.clear()
        self.keep([*self.recent][-1:])
        self.timelines.forget()


@dataclass
class Run:
    name: str
    created_at: float
    control: Control
    latest: Generation
    """The newest generation, whatever became of it: the one that If-Match names."""
    members: dict[int, Member] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    bell: Bell = field(default_factory=Bell)
    """Rings with every event."""
    orders: Bell = field(default_factory=Bell)
    """Rings when what is wanted of the ranks changes: a bell for every report would wake every rank each time."""
    _facts_found: tuple[int, tuple[str, ...]] = (-1, ())
    _facts_of: frozenset[int] | None = None
    """The present ranks that the facts were found for."""

    def seat(self, member: Member) -> None:
        """The rank is this member's from now on."""
        self.members[member.hello.rank] = member
        self._facts_of = None

    @property
    def lead(self) -> tuple[int, Member] | None:
        """The lowest rank that is present, else the lowest of all."""
        rank, _ = self._facts()
        return (rank, self.members[rank]) if rank >= 0 else None

    @property
    def goes_on(self) -> bool:
        """Whether any rank is live or stale."""
        return bool(self.control.present)

    @property
    def owner(self) -> str:
        """Id of the token that its lead came with; empty where nobody knows."""
        return self.lead[1].owner if self.lead else ""

    @property
    def last_seen(self) -> float:
        """When any rank spoke last, since the epoch."""
        return max((member.last_seen for member in self.members.values()), default=self.created_at)

    @property
    def world_size(self) -> int:
        """Ranks of the run as it was started last; 0 before any has said hello."""
        newest = max(self.members.values(), key=lambda member: member.hello.started_at, default=None)
        return newest.hello.world_size if newest else 0

    @property
    def paths(self) -> tuple[str, ...]:
        """Storage paths of the ranks that are present, else of all, in the order of the lowest rank that has them."""
        return self._facts()[1]

    def _facts(self) -> tuple[int, tuple[str, ...]]:
        """Lead (-1 without ranks) and paths: asked for with every report, and changed when ranks come and go."""
        if self._facts_of is not self.control.present:
            ranks = sorted(self.control.present & self.members.keys() or self.members.keys())
            paths = dict.fromkeys(path for rank in ranks for path in self.members[rank].hello.paths)
            self._facts_found, self._facts_of = (min(ranks, default=-1), tuple(paths)), self.control.present
        return self._facts_found

    def publish(self, id: int, kind: str, timestamp: float, data: dict[str, Any]) -> None:
        self.events.append(Event(id=id, kind=kind, run=self.name, timestamp=timestamp, data=data))
        self.bell.ring()
