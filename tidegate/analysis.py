"""What a timeline tells: where an update stalled and why, its critical path, how busy each lane was."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from tidegate.plan.ops import COMPUTE_LANES
from tidegate.timeline import Phase, PhaseSpan, Span, Stall, Timeline

SCHEDULER: Final = "scheduler"


class Interval(Protocol):
    """Anything with a start and an end in seconds: a span, a phase, a stall."""

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


def union(intervals: Iterable[Interval], window: tuple[float, float] | None = None) -> list[tuple[float, float]]:
    """The time in which at least one interval runs, as disjoint stretches in order, cut to `window`."""
    low, high = window or (float("-inf"), float("inf"))
    stretches: list[tuple[float, float]] = []
    for start, end in sorted((max(i.start, low), min(i.end, high)) for i in intervals):
        if start >= end:
            continue
        if stretches and start <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(stretches[-1][1], end))
        else:
            stretches.append((start, end))
    return stretches


def busy_seconds(spans: Iterable[Interval], window: tuple[float, float] | None = None) -> float:
    """Length of the union of the spans: what runs twice at once counts once."""
    return sum(end - start for start, end in union(spans, window))


def busy_by_lane(timeline: Timeline, phase: Phase | None = None) -> dict[str, float]:
    """Busy seconds of each lane that has spans, in one phase or in all."""
    window = timeline.window(phase) if phase is not None else None
    if phase is not None and window is None:
        return {}
    by_lane: defaultdict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        by_lane[span.lane].append(span)
    return {lane: busy_seconds(spans, window) for lane, spans in sorted(by_lane.items())}


def compute_seconds(timeline: Timeline) -> float:
    """Seconds of the update in which the CPU or the device computes; with its stalls, the wall time of the update."""
    window = timeline.window("update")
    return busy_seconds(_compute(timeline), window) if window else 0.0


def stalls(timeline: Timeline) -> tuple[Stall, ...]:
    """The time of the update in which no compute op runs, divided by cause, in order.

    A gap is blamed by following the blocking chain back from the op that ends it: time in which the op that it waited
    for was running goes to that op's lane, time in between to `scheduler` (a gate, or the agent itself). The last gap
    ends with the update, which waits for the span that ends last.
    """
    window = timeline.window("update")
    if window is None:
        return ()
    blockers = _Blockers(timeline)
    by_start = {s.start: s for s in sorted(_compute(timeline), key=lambda s: -s.op) if s.end > s.start}
    last = max((s for s in timeline.spans if s.start < window[1]), key=lambda s: (s.end, s.op), default=None)
    pieces: list[Stall] = []
    for gap in _gaps(union(_compute(timeline), window), window):
        at_the_end = gap[1] == window[1]
        chain = blockers.back_from(last if at_the_end else by_start[gap[1]])
        # What ends a gap runs after it; the chain that explains the gap begins with what that waited for.
        pieces += _blame(gap, itertools.islice(chain, 0 if at_the_end else 1, None))
    return tuple(_merged(pieces))


def exposed_waits(timeline: Timeline) -> dict[str, float]:
    """Seconds for which each cause kept the update from computing: `stalls`, added up."""
    waits: defaultdict[str, float] = defaultdict(float)
    for stall in stalls(timeline):
        waits[stall.cause] += stall.end - stall.start
    return dict(waits)


def critical_path(timeline: Timeline) -> tuple[int, ...]:
    """Ids of the ops that decided when the step ended, first to last: each was the last thing that the next needed."""
    if not timeline.spans:
        return ()
    last = max(timeline.spans, key=lambda span: (span.end, span.op))
    return tuple(span.op for span in _Blockers(timeline).back_from(last))[::-1]


def split_by_phase(span: Interval, phases: Sequence[PhaseSpan]) -> dict[Phase, float]:
    """Share of a span's time in each phase that it meets; what no phase covers is `other`. The shares add up to 1.

    A span of no length belongs to the phase in which it lies.
    """
    if span.end <= span.start:
        return {next((p.phase for p in phases if p.start <= span.start <= p.end), "other"): 1.0}
    for phase in phases:
        # Nearly every span: it lies in one phase.
        if phase.start <= span.start and span.end <= phase.end:
            return {phase.phase: 1.0}
    seconds: defaultdict[Phase, float] = defaultdict(float)
    for phase in phases:
        overlap = min(span.end, phase.end) - max(span.start, phase.start)
        if overlap > 0:
            seconds[phase.phase] += overlap
    total = span.end - span.start
    uncovered = total - busy_seconds(phases, (span.start, span.end))
    # Less than a billionth of the span is rounding, not a hole between phases.
    if uncovered > 1e-9 * total:
        seconds["other"] += uncovered
    covered = sum(seconds.values())
    return {phase: part / covered for phase, part in seconds.items()}


def _compute(timeline: Timeline) -> Iterator[Span]:
    return (span for span in timeline.spans if span.lane in COMPUTE_LANES)


def _gaps(stretches: list[tuple[float, float]], window: tuple[float, float]) -> Iterator[tuple[float, float]]:
    """What the stretches leave of the window."""
    cursor, high = window
    for start, end in stretches:
        if start > cursor:
            yield cursor, start
        cursor = end
    if cursor < high:
        yield cursor, high


class _Blockers:
    """For each span, the span it waited for: the last to end of its dependencies and its lane's last one."""

    def __init__(self, timeline: Timeline) -> None:
        self._deps = timeline.deps
        # An op that was repeated has several spans; whoever depends on it waited for the last.
        self._last_run: dict[int, Span] = {}
        # By identity: hashing all fields of a span takes longer than everything else here.
        self._lane_before: dict[int, Span] = {}
        lane_last: dict[str, Span] = {}
        for span in sorted(timeline.spans, key=lambda span: (span.start, span.end, span.op)):
            self._last_run[span.op] = span
            if span.lane in lane_last:
                self._lane_before[id(span)] = lane_last[span.lane]
            lane_last[span.lane] = span

    def of(self, span: Span) -> Span | None:
        found = [self._last_run[dep] for dep in self._deps.get(span.op, ()) if dep in self._last_run]
        if id(span) in self._lane_before:
            found.append(self._lane_before[id(span)])
        return max(found, key=lambda blocker: (blocker.end, blocker.op), default=None)

    def back_from(self, span: Span | None) -> Iterator[Span]:
        """The span, what it waited for, what that waited for… Clocks that disagree cannot make it go in circles."""
        met: set[int] = set()
        while span is not None and id(span) not in met:
            yield span
            met.add(id(span))
            span = self.of(span)


def _blame(gap: tuple[float, float], chain: Iterable[Span]) -> Iterator[Stall]:
    """Cuts a gap along the chain, from its end to its start."""
    low, cursor = gap
    for span in chain:
        for start, cause in ((span.end, SCHEDULER), (span.start, span.lane)):
            if low < cursor and start < cursor:
                yield Stall("update", cause, max(start, low), cursor)
                cursor = max(start, low)
        if cursor <= low:
            return
    if low < cursor:
        yield Stall("update", SCHEDULER, low, cursor)


def _merged(pieces: Iterable[Stall]) -> Iterator[Stall]:
    """Pieces in order of time, neighbours of one cause made one."""
    last: Stall | None = None
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if last is not None and (last.cause, last.end) == (piece.cause, piece.start):
            last = Stall(last.phase, last.cause, last.start, piece.end)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
