"""State of one run in memory: its generations, its ranks and its newest events, all of bounded size."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from tidegate.daemon.control.liveness import liveness
from tidegate.daemon.control.step_memory import memory_of
from tidegate.daemon.control.timelines import Timelines
from tidegate.daemon.decisions.generations import ControlState, Generation
from tidegate.daemon.decisions.step_window import StepFigures, StepWindow
from tidegate.daemon.storage.records import LastReport, StoredRun
from tidegate.wire.agent import AgentHello, AgentReport, Rates
from tidegate.wire.base import KnobChanges, Liveness
from tidegate.wire.event import Event
from tidegate.wire.evidence import ModelEvidence
from tidegate.wire.run import Breakdown
from tidegate.wire.step import StepReport

RECENT_STEPS: Final = 20
"""Number of complete step reports in memory for each rank. Older steps have only the figures in `StepWindow`."""
EVENTS_KEPT: Final = 1_000
"""Maximum number of events of each run in memory: the newest ones."""
WOKEN_AT_ONCE: Final = 16
"""Number of waiting requests that are woken in one batch."""
BATCH_PAUSE_SECONDS: Final = 0.008
"""Pause between two batches of woken requests: about the time that the responses of one batch take."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Two clocks in seconds: `wall`, since the epoch, for display; `mono`, monotonic, for leases and deadlines."""

    wall: Callable[[], float] = time.time
    mono: Callable[[], float] = time.monotonic


class Notifier:
    """Notifies requests that wait for a change, in batches.

    If hundreds of ranks were woken together, their responses would delay each other and the reports of other ranks.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], str] = {}
        """Futures of waiting requests in the order of their arrival, each with the name of the caller."""
        self._to_wake: deque[asyncio.Future[None]] = deque()
        """Futures that are to be woken."""

    def notify_all(self) -> None:
        """Wakes all waiting requests, in batches."""
        if self._waiting:
            idle = not self._to_wake
            self._to_wake.extend(self._waiting)
            self._waiting.clear()
            if idle:
                self._wake()

    def notify(self, who: str) -> None:
        """Wakes the waiting requests of one caller at once."""
        for woken in [woken for woken, name in self._waiting.items() if name == who]:
            _set(woken)

    async def wait(self, seconds: float, who: str = "") -> None:
        """Waits until notified, at most `seconds`. `who`: the caller's name for `notify`."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        self._waiting[woken] = who
        timer = loop.call_later(seconds, _set, woken)
        try:
            await woken
        finally:
            timer.cancel()
            self._waiting.pop(woken, None)

    def _wake(self) -> None:
        for _ in range(min(WOKEN_AT_ONCE, len(self._to_wake))):
            _set(self._to_wake.popleft())
        if self._to_wake:
            asyncio.get_running_loop().call_later(BATCH_PAUSE_SECONDS, self._wake)


def _set(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


@dataclass
class Member:
    """A rank of a run, with the agent that holds it and what that agent has reported."""

    hello: AgentHello
    seen_mono: float
    """Time of the last message on the monotonic clock; -inf if the rank was lost before the daemon started."""
    last_seen: float
    """Time of the last message in seconds since the epoch."""
    owner: str = ""
    """Id of the token that the agent used."""
    since: float = 0.0
    """Time at which the agent registered, in seconds since the epoch."""
    ended: Liveness | None = None
    """`finished` or `failed` after the agent's goodbye; None before."""
    announced: Liveness = "live"
    """The liveness that was last published as an event and in the audit log."""
    step: int = 0
    reported_at: float = -math.inf
    """Timestamp of the newest report, by the agent's own clock."""
    phase: str = "other"
    applied_generation: int = 0
    reported_generation: int = -1
    applied: dict[int, int] = field(default_factory=dict)
    """First step of this agent with each generation, by generation number."""
    effective: KnobChanges = field(default_factory=dict)
    rates: Rates | None = None
    evidence: ModelEvidence | None = None
    predicted_update_seconds: float | None = None
    timelines: Timelines = field(default_factory=Timelines)
    recent: deque[StepReport] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    recent_bytes: int = 0
    """Estimated memory of the steps in `recent`. Only `set_recent` and `add` may change `recent`: they update this."""
    window: StepWindow = field(default_factory=StepWindow)

    def liveness(self, now: float, lease_seconds: float) -> Liveness:
        if self.ended is not None:
            return self.ended
        return "lost" if self.seen_mono == -math.inf else liveness(now - self.seen_mono, lease_seconds)

    def add_report(self, report: AgentReport) -> tuple[StepReport, ...]:
        """Stores a report in memory. Returns its steps that are new, because an agent may report a step twice."""
        self.reported_at = report.timestamp
        self.step = report.step
        self.phase = report.phase
        self.effective = report.effective
        self.applied_generation = max(self.applied_generation, report.generation)
        self.rates, self.evidence = report.rates or self.rates, report.evidence or self.evidence
        if report.timeline is not None:
            self.timelines.add(report.timeline)
        self.predicted_update_seconds = report.predicted_update_seconds
        return tuple(step for step in sorted(report.steps, key=lambda step: step.step) if self.add(step))

    def add(self, step: StepReport) -> bool:
        """Adds a step if its number is larger than the numbers of all steps before. Returns whether it was added."""
        if step.step <= self.window.newest:
            return False
        self.window.add(StepFigures.of(step))
        if len(self.recent) == RECENT_STEPS:
            self.recent_bytes -= memory_of(self.recent[0])
        self.recent.append(step)
        self.recent_bytes += memory_of(step)
        return True

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of all subgroups of the rank."""
        told = self.evidence.subgroups if self.evidence else None
        sizes = self.hello.subgroups if told is None else told
        return sum(one.numel * one.state_bytes * one.count for one in sizes)

    def is_past(self, report: AgentReport) -> bool:
        """Whether the report is older than the newest report, both by its timestamp and by its step.

        A lower timestamp alone is normal (a clock may be set back), and so is a lower step alone (training may resume
        from an earlier checkpoint).
        """
        return report.timestamp < self.reported_at and report.step < self.step

    @property
    def last_report(self) -> dict[str, Any]:
        """The fields of the newest report that belong to no step, for storage."""
        return {
            "phase": self.phase,
            "effective": dict(self.effective),
            "predicted_update_seconds": self.predicted_update_seconds,
            "rates": self.rates.model_dump(exclude_unset=True) if self.rates else None,
            "evidence": self.evidence.model_dump(mode="json") if self.evidence else None,
        }

    def restore_last_report(self, stored: dict[str, Any]) -> None:
        """Restores the fields that were stored from `last_report`."""
        for name, value in LastReport.model_validate(stored):
            setattr(self, name, value)

    def set_recent(self, steps: Iterable[StepReport]) -> None:
        """Replaces the steps in `recent` by `steps`, which are oldest first."""
        self.recent.clear()
        self.recent.extend(steps)
        self.recent_bytes = sum(map(memory_of, self.recent))

    def forget(self) -> None:
        """Drops steps and timelines from memory, except for the last step."""
        self.window.clear()
        self.set_recent([*self.recent][-1:])
        self.timelines.forget()


@dataclass
class Run:
    """A run: its generations, its ranks and its newest events."""

    name: str
    created_at: float
    control: ControlState
    latest: Generation
    """The newest generation in any state. Its number is the ETag that If-Match must name."""
    members: dict[int, Member] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    breakdown: Breakdown | None = None
    """How the run broke down; None if it did not, or goes on again."""
    event_notifier: Notifier = field(default_factory=Notifier)
    """Wakes the requests that wait for the next event of this run."""
    directive_notifier: Notifier = field(default_factory=Notifier)
    """Wakes the requests of ranks that wait for a new directive (the committed knobs, and the proposal to vote on). It
    is separate from `event_notifier`, because that wakes its requests at every report of a rank."""
    _lead_and_paths_cache: tuple[int, tuple[str, ...]] = (-1, ())
    _cached_for: frozenset[int] | None = None
    """The present ranks for which `_lead_and_paths_cache` was computed; None: it must be computed again."""

    def seat(self, member: Member) -> None:
        """Makes `member` the holder of its rank, in place of an earlier member."""
        self.members[member.hello.rank] = member
        self._cached_for = None

    @property
    def lead(self) -> tuple[int, Member] | None:
        """The lead rank: the lowest rank that is present, else the lowest of all ranks."""
        rank, _ = self._lead_and_paths()
        return (rank, self.members[rank]) if rank >= 0 else None

    @property
    def is_running(self) -> bool:
        """Whether any rank is live or stale."""
        return bool(self.control.present)

    @property
    def owner(self) -> str:
        """Id of the token of the lead rank; empty if unknown."""
        return self.lead[1].owner if self.lead else ""

    @property
    def last_seen(self) -> float:
        """Time of the last message of any rank, in seconds since the epoch."""
        return max((member.last_seen for member in self.members.values()), default=self.created_at)

    def stored(self, breakdown: Breakdown | None) -> StoredRun:
        """The run as it is stored, with this breakdown."""
        return StoredRun(name=self.name, created_at=self.created_at, breakdown=breakdown)

    def is_restarted(self, member: Member) -> bool:
        """Whether the rank's agent has registered since the run broke down."""
        return self.breakdown is not None and member.since >= self.breakdown.at

    def breakdown_after(self, member: Member, state: Liveness, at: float, error: str = "") -> Breakdown | None:
        """The breakdown of the run once `member` has the liveness `state` (lost, failed or finished). The first failure
        since the last start counts: those of other ranks are its consequences. `error`: name of the exception's type.
        """
        known, rank = self.breakdown, member.hello.rank
        if error and (known is None or not known.error or self.is_restarted(member)):
            lost = known is not None and known.lost
            return Breakdown(at=at, rank=rank, step=member.step, error=error, lost=lost)
        announced = {state, *(other.announced for other in self.members.values() if other is not member)}
        if known is None and "lost" in announced and not self.control.present - {rank}:
            return Breakdown(at=at, rank=rank, step=member.step, lost=True)
        return known

    @property
    def world_size(self) -> int:
        """Number of ranks of the run's last start; 0 before the first rank has registered."""
        newest = max(self.members.values(), key=lambda member: member.hello.started_at, default=None)
        return newest.hello.world_size if newest else 0

    @property
    def paths(self) -> tuple[str, ...]:
        """Storage paths of the present ranks, else of all ranks, in the order of the lowest rank that has them."""
        return self._lead_and_paths()[1]

    def _lead_and_paths(self) -> tuple[int, tuple[str, ...]]:
        """The lead rank (-1 without ranks) and the paths. Cached, because every report needs them."""
        if self._cached_for is not self.control.present:
            ranks = sorted(self.control.present & self.members.keys() or self.members.keys())
            paths = dict.fromkeys(path for rank in ranks for path in self.members[rank].hello.paths)
            self._lead_and_paths_cache = (min(ranks, default=-1), tuple(paths))
            self._cached_for = self.control.present
        return self._lead_and_paths_cache

    def publish(self, id: int, kind: str, timestamp: float, data: dict[str, Any]) -> None:
        self.events.append(Event(id=id, kind=kind, run=self.name, timestamp=timestamp, data=data))
        self.event_notifier.notify_all()
