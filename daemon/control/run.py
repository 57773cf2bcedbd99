"""One run as the daemon sees it now: its control, its ranks, its newest events. Lives in memory, bounded."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tidegate.daemon.control.generations import Control, Generation
from tidegate.daemon.control.liveness import liveness
from tidegate.daemon.control.timelines import Timelines
from tidegate.wire import AgentHello, AgentReport, Event, KnobChanges, Liveness, Rates, StepReport

STEPS_KEPT: Final = 256
EVENTS_KEPT: Final = 1_000


@dataclass(frozen=True, slots=True)
class Clock:
    """`wall` is seconds since the epoch, for people; `mono` never jumps, for leases and deadlines."""

    wall: Callable[[], float] = time.time
    mono: Callable[[], float] = time.monotonic


class Bell:
    """Wakes everyone who waits for a change. All on one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Until the next ring, or `seconds`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), seconds)


@dataclass
class Member:
    """The agent that holds a rank."""

    hello: AgentHello
    seen: float
    """On the monotonic clock; -inf when it was lost before the daemon started."""
    last_seen: float
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
    steps: deque[StepReport] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))

    def liveness(self, now: float, lease_seconds: float) -> Liveness:
        if self.finished:
            return "finished"
        return "lost" if self.seen == -math.inf else liveness(now - self.seen, lease_seconds)

    def take(self, report: AgentReport) -> None:
        """Remembers what the rank says; steps that it tells twice are kept once."""
        self.said_at = report.timestamp
        self.step = report.step
        self.phase = report.phase
        self.effective = report.effective
        self.applied_generation = max(self.applied_generation, report.generation)
        self.rates = report.rates or self.rates
        if report.timeline is not None:
            self.timelines.take(report.timeline)
        self.predicted_update_seconds = report.predicted_update_seconds
        newest = self.steps[-1].step if self.steps else -1
        self.steps.extend(step for step in report.steps if step.step > newest)

    def is_past(self, report: AgentReport) -> bool:
        """Whether the report is older than one that was taken, by its clock and by its step.

        Either alone happens to honest ranks: clocks are set back, training goes back to a checkpoint.
        """
        return report.timestamp < self.said_at and report.step < self.step

    def forget(self) -> None:
        """Drops what is large."""
        self.steps.clear()
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

    @property
    def lead(self) -> tuple[int, Member] | None:
        """The lowest rank that is present, else the lowest of all."""
        ranks = self.control.present & self.members.keys() or self.members.keys()
        return min(((rank, self.members[rank]) for rank in ranks), key=lambda pair: pair[0], default=None)

    @property
    def world_size(self) -> int:
        """Ranks of the run as it was started last; 0 before any has said hello."""
        newest = max(self.members.values(), key=lambda member: member.hello.started_at, default=None)
        return newest.hello.world_size if newest else 0

    @property
    def paths(self) -> tuple[str, ...]:
        """Storage paths of the ranks that are present, else of all, in the order of the lowest rank that has them."""
        ranks = self.control.present & self.members.keys() or self.members.keys()
        return tuple(dict.fromkeys(path for rank in sorted(ranks) for path in self.members[rank].hello.paths))

    def publish(self, id: int, kind: str, timestamp: float, data: dict[str, Any]) -> None:
        self.events.append(Event(id=id, kind=kind, run=self.name, timestamp=timestamp, data=data))
        self.bell.ring()
