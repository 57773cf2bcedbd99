"""Turns finished steps into figures: one StepReport a step, running totals for /metrics, the newest timeline."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidegate.agent.engine.engine import StepResult
from tidegate.agent.optimizer import AdamW
from tidegate.agent.telemetry.phases import StepPhases
from tidegate.analysis import split_by_phase, stalls
from tidegate.catalogue import SECONDS_BUCKETS
from tidegate.errors import ConfigError
from tidegate.model.rates import RateCard
from tidegate.model.simulate import simulate
from tidegate.plan import Plan
from tidegate.plan.ops import CPU, LINK_LANES
from tidegate.timeline import PhaseSpan, Span, Timeline
from tidegate.wire import LinkRow, StallRow, StepReport

MAX_UNREPORTED_STEPS = 256
PREDICT_EVERY = 4
"""Steps between two looks at rates and prediction while the plan stays the same."""
RATE_WINDOW = 5
"""Timelines that the live rate card is made from."""


@dataclass
class Histogram:
    """Observations of one series; `counts[i]` are those up to SECONDS_BUCKETS[i], the last one all the others."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BUCKETS) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(SECONDS_BUCKETS, value)] += 1
        self.total += value


@dataclass
class Totals:
    """What /metrics shows: counters by label values, and the newest gauges."""

    steps: int = 0
    skipped: int = 0
    tokens: int = 0
    phases: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    cpu: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    stalls: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    link_bytes: defaultdict[tuple[str, str, str], int] = field(default_factory=lambda: defaultdict(int))
    link_busy: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    updated: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    last: StepReport | None = None
    predicted_update_seconds: float | None = None
    prediction_error: float | None = None


class Recorder:
    """Fed by the training thread once a step. `lock` guards what other threads read."""

    def __init__(self, optimizer: AdamW) -> None:
        self.lock = threading.Lock()
        self.totals = Totals()
        self.unreported: deque[StepReport] = deque(maxlen=MAX_UNREPORTED_STEPS)
        self.timeline: Timeline | None = None
        self.rates: RateCard | None = None
        self.cpu_seconds = 0.0
        """CPU time that recording has cost so far."""
        self._optimizer = optimizer
        self._predicted_plan: Plan | None = None
        self._recent: deque[Timeline] = deque(maxlen=RATE_WINDOW)

    def record(self, result: StepResult, phases: StepPhases) -> None:
        """Called when a step has ended."""
        began = time.thread_time()
        if result.plan is not self._predicted_plan:
            # What was predicted was another plan's.
            self.totals.predicted_update_seconds = None
        timeline = _timeline(self.totals.steps + 1, result, phases)
        report = self._report(result, phases, timeline)
        with self.lock:
            self._add(report)
            self.timeline = timeline
            self.unreported.append(report)
        self._recent.append(timeline)
        if not result.skipped:
            self._learn(result.plan)
        self.cpu_seconds += time.thread_time() - began

    def take_unreported(self) -> tuple[StepReport, ...]:
        with self.lock:
            taken = tuple(self.unreported)
            self.unreported.clear()
        return taken

    def give_back(self, steps: Sequence[StepReport]) -> None:
        """These could not be delivered: they come first next time, the oldest fall off."""
        with self.lock:
            later = list(self.unreported)
            self.unreported.clear()
            self.unreported.extend([*steps, *later])

    def _report(self, result: StepResult, phases: StepPhases, timeline: Timeline) -> StepReport:
        memory, logged = self._optimizer.engine.memory, self._optimizer.logged
        self._optimizer.logged = {}
        residences = memory.residence
        tokens = logged.get("tokens")
        return StepReport(
            step=timeline.step,
            timestamp=time.time(),
            phase_seconds=dict(phases.seconds().items()),
            exposed_seconds=dict(phases.exposed_seconds.items()),
            stalls=_stall_rows(timeline, phases),
            links=_link_rows(timeline),
            device_memory_peak_bytes=dict(phases.device_peak_bytes.items()),
            host_memory_bytes=memory.host_bytes(),
            cpu_seconds={phase: max(0.0, seconds) for phase, seconds in phases.cpu_seconds.items()},
            update_params=_updated(timeline.spans),
            subgroups={where: residences.count(where) for where in ("host", "device")},
            loss=logged.get("loss"),
            tokens=None if tokens is None else int(tokens),
            grad_norm=result.grad_norm,
            skipped=result.skipped,
        )

    def _add(self, report: StepReport) -> None:
        totals = self.totals
        totals.steps += 1
        totals.skipped += report.skipped
        totals.tokens += report.tokens or 0
        for phase, seconds in report.phase_seconds.items():
            totals.phases[phase].observe(seconds)
        for target, rows in ((totals.exposed, report.exposed_seconds), (totals.cpu, report.cpu_seconds)):
            for phase, seconds in rows.items():
                target[phase] += seconds
        for stall in report.stalls:
            totals.stalls[stall.phase, stall.cause] += stall.seconds
        for link in report.links:
            totals.link_bytes[link.direction, link.phase, link.content] += link.bytes
            totals.link_busy[link.direction, link.phase] += link.busy_seconds
        for processor, numel in report.update_params.items():
            totals.updated[processor] += numel
        measured = report.phase_seconds.get("update")
        if totals.predicted_update_seconds and measured and not report.skipped:
            totals.prediction_error = abs(totals.predicted_update_seconds - measured) / measured
        totals.last = report

    def _learn(self, plan: Plan) -> None:
        """Rates of the last steps, and from them what the next update will take if the plan stays."""
        if plan is self._predicted_plan and self.totals.steps % PREDICT_EVERY:
            return
        self._predicted_plan = plan
        self.rates = RateCard.from_timelines(self._recent, previous=self.rates)
        try:
            predicted = simulate(plan, self.rates, step_at=self._backward_seconds()).window("update")
        except ConfigError:
            return  # a rate that this plan needs was not seen yet
        with self.lock:
            self.totals.predicted_update_seconds = None if predicted is None else predicted[1] - predicted[0]

    def _backward_seconds(self) -> float:
        last = self.totals.last
        return last.phase_seconds.get("backward", 0.0) if last is not None else 0.0


def _timeline(step: int, result: StepResult, phases: StepPhases) -> Timeline:
    """The step's spans and phases from second 0 on."""
    starts = [span.start for span in result.spans] + [phase.start for phase in phases.spans]
    zero = min(starts, default=time.monotonic())
    return Timeline(
        step=step,
        source="measured",
        spans=tuple(
            Span(s.op, s.kind, s.lane, s.subgroup, s.start - zero, s.end - zero, s.nbytes, s.numel, s.content, s.slot)
            for s in result.spans
        ),
        phases=tuple(PhaseSpan(p.phase, p.start - zero, p.end - zero) for p in phases.spans),
        deps={op.id: op.deps for op in result.plan.ops},
        origin=time.time() - (time.monotonic() - zero),
    )


def _stall_rows(timeline: Timeline, phases: StepPhases) -> tuple[StallRow, ...]:
    """Stalls of the update by cause; in other phases what hooks held up the training thread."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for stall in stalls(timeline):
        seconds[stall.phase, stall.cause] += stall.end - stall.start
    for phase, exposed in phases.exposed_seconds.items():
        if phase != "update":
            seconds[phase, "scheduler"] += exposed
    return tuple(StallRow(phase=phase, cause=cause, seconds=value) for (phase, cause), value in seconds.items())


def _link_rows(timeline: Timeline) -> tuple[LinkRow, ...]:
    """Bytes and busy time by direction, phase and content; a copy across a boundary is divided by time."""
    moved: dict[tuple[str, str, str], int] = defaultdict(int)
    busy: dict[tuple[str, str, str], float] = defaultdict(float)
    for span in timeline.spans:
        if span.lane not in LINK_LANES or span.content is None:
            continue
        shares = split_by_phase(span, timeline.phases)
        left = span.nbytes
        for i, (phase, share) in enumerate(shares.items()):
            # The last phase takes what rounding left, so that phases add up to what was copied.
            nbytes = left if i == len(shares) - 1 else round(span.nbytes * share)
            left -= nbytes
            moved[span.lane, phase, span.content] += nbytes
            busy[span.lane, phase, span.content] += span.seconds * share
    return tuple(
        LinkRow(direction=lane, phase=phase, content=content, bytes=nbytes, busy_seconds=busy[lane, phase, content])
        for (lane, phase, content), nbytes in moved.items()
    )


def _updated(spans: Sequence[Span]) -> dict[str, int]:
    done = {"cpu": 0, "device": 0}
    for span in spans:
        if span.kind.value.endswith("_update"):
            done["cpu" if span.lane == CPU else "device"] += span.numel
    return done
